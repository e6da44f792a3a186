"""The controller with 8 to 1,024 servers, as a markdown table: a simulation on a virtual clock (areal_x.simulation).

    python -m benchmarks.scale [--servers 8 32 128 512 1024] [--steps 12] [--journal] [--profile]

Claims: the trainer hardly waits if the servers are a tenth faster than it, although lengths have long tails; no group is older
than the bound; trained completions are as long as sampled ones, so quick answers are not preferred; one core is enough for
2,000 finished trajectories per second.

Method: the real runner, queue, measures and (--journal) journal; fake servers of 8 slots that decode n requests in 0.01 +
0.0005 n seconds per token; prompts of 100 tokens, completions lognormal with sigma 1 and a mean of 300, capped at 3,000; 4
groups of 8 per server and step; max_staleness 2, a window of one step's groups. The trainer consumes 90 % of what full servers
produce. Idle shares exclude the first step, for which nothing could be generated in advance. CPU is that of this process with
all its threads, including the simulated servers, divided by finished trajectories; the machine should otherwise be idle. Queue:
the largest size of the arrays of finished groups that wait. Sampled: all tickets up to the highest consumed one. The last row
is the first without staleness. --profile prints a profile, which slows the run.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from areal_x.rollout.episodes import TRAINING, seed_of
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.run.journal import Journal, NullRecorder, Recorder
from areal_x.simulation import FakeEngine, FakeTrainer, Speed, lognormal, simulate
from areal_x.types import Group

SLOTS, PROMPT, GROUP_SIZE, GROUPS_A_SERVER, MAX_STALENESS = 8, 100, 8, 4, 2
LENGTH = lognormal(300, 1.0, 3000)
SPEED = Speed(20_000, lambda n: n / (0.01 + 0.0005 * n), swap_seconds=1.0)
COLUMNS = (
    *("servers", "`max_staleness`", "trainer idle", "slots idle", "oldest (bound)", "trained / drawn length", "queue"),
    *("CPU each", "a second"),
)
LOAD = 0.9  # the trainer's speed relative to the servers'


@dataclass
class Held(Recorder):
    """Counts the content of the queue, and forwards the rest to a journal."""

    journal: Recorder
    bytes: int = 0
    most: int = 0
    trajectories: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # new tokens of each consumed group

    def admitted(self, group: Group, position: int) -> None:
        self.journal.admitted(group, position)

    def finished(self, group: Group) -> None:
        self.trajectories += len(group.episodes)
        self.bytes += size(group)
        self.most = max(self.most, self.bytes)
        self.journal.finished(group)

    def given_back(self, group: Group) -> None:
        self.journal.given_back(group)

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        for group in groups:
            self.bytes -= size(group)
            self.lengths[group.ticket] = sum(len(e.trajectories[0]) - PROMPT for e in group.episodes)
        self.journal.consumed(step, groups)


def size(group: Group) -> int:
    trajectories = [t for e in group.episodes for t in e.trajectories]
    return sum(x.nbytes for t in trajectories for x in (t.tokens, t.mask, t.logprobs, t.versions))


def drawn(ticket: int) -> int:
    """New tokens of a group, finished or not."""
    return sum(LENGTH(seed_of(0, TRAINING, ticket, episode, 0)) for episode in range(GROUP_SIZE))


def simulated(servers: int, steps: int, recorder: Recorder, max_staleness: int) -> list[dict[str, float]]:
    mean = sum(LENGTH(seed) for seed in range(10_000)) / 10_000
    seconds_each = mean / SPEED.decode(SLOTS) + PROMPT / SPEED.prefill  # per server
    groups = GROUPS_A_SERVER * servers
    trainer = FakeTrainer(groups * GROUP_SIZE * seconds_each / servers / LOAD, publish_seconds=2.0)
    engine = FakeEngine(SPEED, servers=servers, concurrency=SLOTS, length=LENGTH)
    sizes = {"groups_per_step": groups, "group_size": GROUP_SIZE, "max_staleness": max_staleness, "window": groups}
    return simulate(engine, trainer, steps=steps, recorder=recorder, **sizes)


def measure(servers: int, steps: int, journal: bool, max_staleness: int = MAX_STALENESS) -> str:
    groups = GROUPS_A_SERVER * servers
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder)) if journal else nullcontext() as written:
        held = Held(written or NullRecorder())
        began = time.process_time()
        rows = simulated(servers, steps, held, max_staleness)
        if written is not None:
            written.flush()
        cpu = (time.process_time() - began) / held.trajectories
    bound = (TrajectoryQueue(groups, max_staleness).slots + groups - 2) // groups
    oldest = max(row["staleness_max"] for row in rows)
    assert oldest <= bound, f"a group was {oldest} versions old, and the bound is {bound}"
    settled = rows[1:]
    seconds = sum(row["seconds"] for row in settled)
    idle = sum(row["wait_seconds"] for row in settled) / seconds
    used = sum(row["slot_seconds"] for row in settled) / seconds / (servers * SLOTS)
    last = max(held.lengths)
    all_drawn = [held.lengths.get(ticket) or drawn(ticket) for ticket in range(last + 1)]
    ratio = (sum(held.lengths.values()) / len(held.lengths)) / (sum(all_drawn) / len(all_drawn))
    assert abs(ratio - 1) < 0.01, f"what was trained on is {ratio} times as long as what was drawn"
    return (
        f"| {servers:,} | {max_staleness} | {idle:.1%} | {1 - used:.1%} | {oldest} ({bound}) | {ratio:.3f} "
        f"| {held.most / 2**20:.1f} MiB | {cpu * 1e6:.0f} µs | {1 / cpu:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", type=int, default=[8, 32, 128, 512, 1024])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--journal", action="store_true", help="record everything in a journal, too")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most time")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    with cProfile.Profile() if options.profile else nullcontext() as profile:
        for servers in options.servers:
            print(measure(servers, options.steps, options.journal), flush=True)
        print(measure(options.servers[0], options.steps, options.journal, max_staleness=0), flush=True)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
