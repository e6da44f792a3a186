"""Misbehaving rewards: their outcomes, the stalls of the event loop, and the processes they leave behind.

    python benchmarks/rewards.py

Claim: each gives a Failed or TimedOut outcome, the loop never stalls for 50 ms, and no process is left.

`--each` scores of every kind below are requested at once from a pool of `--workers` processes with a time limit of one second
and 300 MB, among as many of a well-behaved reward. A task on the same loop repeatedly sleeps a millisecond and reads the clock:
the longest time between two readings, minus that millisecond, is the longest stall. The first row is the idle loop and shows
the machine's own stalls. A process is left behind if it is a worker or was started by one and still runs after the pool was
closed: all processes of the machine are searched for the marker that workers have in their environment.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal_x.rewards.pool import RewardLimits, RewardPool
from areal_x.types import Failed, Outcome, Scored, Task, TimedOut

MARK = "AREAL_X_BENCHMARK_REWARDS"
KINDS = ("well", "raises", "hangs", "segfaults", "allocates", "is not a number", "is a string", "forks", "forks and leaves")


def reward(task: Task, text: str) -> object:
    match text:
        case "raises":
            raise ValueError("no such number")
        case "hangs":
            while True:
                pass
        case "segfaults":
            ctypes.string_at(0)
        case "allocates":
            kept = []
            while True:
                kept.append(bytearray(50_000_000))
        case "is not a number":
            return float("nan")
        case "is a string":
            return "1.0"
        case "forks":
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
        case "forks and leaves":
            if os.fork() == 0:
                os.setsid()
                time.sleep(1000)
            raise RuntimeError("left a child")
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    print("| reward | scores | outcomes | longest stall, ms | processes left |\n|---|---|---|---|---|")
    print(f"| none | | | {1000 * asyncio.run(stall_during(asyncio.sleep(3)))[0]:.1f} | |")
    for kind in KINDS:
        kinds = [kind] * options.each + ["well"] * (options.each if kind != "well" else 0)
        stall, outcomes = asyncio.run(stall_during(scores(kinds, options.workers)))
        bad = [outcome for outcome, of in zip(outcomes, kinds, strict=True) if of == kind]
        good = [outcome for outcome, of in zip(outcomes, kinds, strict=True) if of == "well"]
        assert all(isinstance(outcome, Scored) for outcome in good), good
        found = ", ".join(f"{count} × {words}" for words, count in Counter(map(described, bad)).items())
        print(f"| {kind} | {len(bad)} | {found} | {1000 * stall:.1f} | {left()} |", flush=True)


async def scores(kinds: list[str], workers: int) -> list[Outcome]:
    pool = RewardPool(reward, workers, 1.0, RewardLimits(memory_gb=0.3))
    try:
        return await asyncio.gather(*(pool.score(Task("t", "p"), kind) for kind in kinds))
    finally:
        await pool.close()


async def stall_during(work):
    """Returns the longest stall in seconds, and the result of the work."""
    longest = 0.0

    async def look():
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last - 0.001), now

    looking = asyncio.create_task(look())
    found = await work
    looking.cancel()
    return longest, found


def described(outcome: Outcome) -> str:
    match outcome:
        case Failed(error):
            return f"Failed: {error}"
        case TimedOut(seconds):
            return f"TimedOut after {seconds:g} s"
        case Scored(value):
            return f"Scored {value:g}"
    raise AssertionError(outcome)


def left() -> int:
    """Processes with our marker, except this one and those that ended."""
    mark, found = f"{MARK}={os.getpid()}".encode(), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            found += alive and int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
