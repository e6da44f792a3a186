"""What a Ray cluster costs: its start, a call of all ranks with a batch, and a step of a run with one rank.

    python -m benchmarks.cluster [--ranks 2 8] [--megabytes 43] [--calls 20] [--rounds 0] [--backend jax]

Calls: ranks are actors that do nothing, so that only the calls are measured, which are made as updates are: the driver's CPU
time and the wall time of one.
Steps (--rounds 20): a run of examples/arithmetic/grpo.gin in one process and one on Ray with one rank, both up at once; in each
round one is stopped (SIGSTOP, all of its processes) while the other takes four steps, and the other way round: CPU time of all
their processes and wall time of a step, and the quartiles of their ratios.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from areal_x.cluster.connection import connected
from areal_x.cluster.gang import PerNode, Room
from areal_x.cluster.on_ray import RayGang
from areal_x.cluster.surroundings import surroundings
from areal_x.monitor.metrics import read
from areal_x.types import Batch

IDLE_SECONDS = 2.0
WARM = 3  # steps before the clock starts
STEPS_EACH = 4  # of one run while the other is stopped
BYTES_EACH = 41  # of a token in a batch of GRPO


class Idle:
    """A rank that looks at a batch."""

    def update(self, batch: Batch) -> int:
        return int(batch.tokens[0, 0])


def batch_of(megabytes: float) -> Batch:
    tokens = int(megabytes * 1e6 / BYTES_EACH) // 1024
    ids = np.zeros((tokens, 1024), np.int32)
    floats = [np.zeros((tokens, 1024), np.float32) for _ in range(6)]
    mask = np.ones((tokens, 1024), bool)
    logp, proximal, advantages, weights, values, returns = floats
    return Batch(
        ids,
        ids,
        ids,
        mask,
        behavior_logp=logp,
        proximal_logp=proximal,
        advantages=advantages,
        weights=weights,
        old_values=values,
        returns=returns,
    )


def idle(_: int) -> Idle:
    return Idle()


def cpu_seconds(process: psutil.Process) -> Counter[str]:
    """Of a process and its family, by what they are: "driver", "ranks" and "Ray"."""
    spent: Counter[str] = Counter()
    for member in [process, *process.children(recursive=True)]:
        try:
            times, command = member.cpu_times(), member.cmdline()
        except psutil.Error:
            continue
        title = command[0] if command else ""
        part = "driver" if member.pid == process.pid else "ranks" if title.startswith("ray::Process") else "Ray"
        spent[part] += times.user + times.system + times.children_user + times.children_system
    return spent


@dataclass(frozen=True)
class Mark:
    """Where a run is: its last step, and what it has spent."""

    step: int
    seconds: float
    cpu: Counter[str]


class Run:
    """A run of the example in a process of its own, which can be stopped and go on with all its family."""

    def __init__(self, cluster: str, backend: str, folder: str) -> None:
        how = f"train.cluster = {cluster!r}", f"train.backend = {backend!r}", f"train.runs = {folder!r}"
        how = *how, f"train.name = {cluster!r}", "train.steps = 10000", "train.evaluate_every = 0", "train.checkpoint_every = 0"
        command = [sys.executable, "-m", "areal_x.train", "examples/arithmetic/grpo.gin", *(x for h in how for x in ("-b", h))]
        self.folder = Path(folder, cluster)
        self.driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def family(self) -> list[psutil.Process]:
        return [self.driver, *self.driver.children(recursive=True)]

    def step(self) -> int:
        rows = read(self.folder) if (self.folder / "metrics.jsonl").exists() else []
        return int(rows[-1]["step"]) if rows else -1

    def at(self, step: int) -> Mark:
        """Waits for the end of a step."""
        while (now := self.step()) < step:
            if self.driver.poll() is not None:
                raise SystemExit(f"the run in {self.folder} has ended")
            time.sleep(0.01)
        return Mark(now, time.perf_counter(), cpu_seconds(self.driver))

    @contextmanager
    def alone(self, other: Run) -> Iterator[None]:
        """Stops another run while this one goes on."""
        stopped = other.family()
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    def steps(self, count: int) -> tuple[Counter[str], float]:
        """Seconds of CPU and of wall of a step, from the end of the one that is going on."""
        begun = self.at(self.step() + 1)
        ended = self.at(begun.step + count)
        taken = ended.step - begun.step
        cpu = Counter({part: (spent - begun.cpu[part]) / taken for part, spent in ended.cpu.items()})
        return cpu, (ended.seconds - begun.seconds) / taken


def compare_steps(backend: str, rounds: int) -> None:
    """Two runs at once, of which one is stopped while the other takes STEPS_EACH steps: so that both meet the same machine."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {cluster: Run(cluster, backend, folder) for cluster in ("here", "ray")}
        try:
            for run in runs.values():
                run.at(WARM)
            ratios = []
            for turn in range(rounds):
                found = {}
                for cluster in ("here", "ray")[:: 1 if turn % 2 else -1]:
                    other = runs["ray" if cluster == "here" else "here"]
                    with runs[cluster].alone(other):
                        found[cluster] = runs[cluster].steps(STEPS_EACH)
                (here, here_wall), (ray, ray_wall) = found["here"], found["ray"]
                shares = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in ray.items())
                print(
                    f"{backend}: {1e3 * here.total():.0f} ms of CPU and {1e3 * here_wall:.0f} ms a step in one process, "
                    f"{1e3 * ray.total():.0f} ({shares}) and {1e3 * ray_wall:.0f} on Ray",
                    flush=True,
                )
                ratios.append((ray.total() / here.total(), ray_wall / here_wall))
            print(f"{backend}, on Ray by one process, quartiles of {rounds} rounds:")
            for what, values in zip(("CPU", "time"), zip(*ratios, strict=True), strict=True):
                print(f"  {what} " + ", ".join(f"{value:.3f}" for value in np.quantile(values, (0.25, 0.5, 0.75))))
        finally:
            for run in runs.values():
                run.driver.terminate()
            for run in runs.values():
                run.driver.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--megabytes", type=float, default=43)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--backend", default="jax")
    options = parser.parse_args()
    if options.rounds:
        compare_steps(options.backend, options.rounds)
        return
    batch = batch_of(options.megabytes)
    began = time.perf_counter()
    with connected(cpus=max(options.ranks)):
        print(f"Ray was up after {time.perf_counter() - began:.1f} s")
        for ranks in options.ranks:
            began = time.perf_counter()
            gang = RayGang("rank", ranks, Room(), partial(idle), surroundings(None))
            print(f"{ranks} ranks were up after {time.perf_counter() - began:.1f} s")
            cpu = time.process_time()
            time.sleep(IDLE_SECONDS)
            idle_share = (time.process_time() - cpu) / IDLE_SECONDS
            spent, took = [], []
            for _ in range(options.calls):
                cpu, wall = time.process_time(), time.perf_counter()
                gang.measured("update", batch=PerNode(dict.fromkeys(gang.nodes, batch)))
                spent.append(time.process_time() - cpu)
                took.append(time.perf_counter() - wall)
            gang.end()
            of_call, wall = 1e3 * median(spent), 1e3 * median(took)
            print(f"{ranks} ranks: {of_call:.2f} ms of CPU and {wall:.1f} ms a call")
            print(f"between calls the driver takes {100 * idle_share:.1f} % of a core")


if __name__ == "__main__":
    main()
