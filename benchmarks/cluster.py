"""What a Ray cluster costs: its start, a call of all ranks with a batch, and a step of a run with one rank.

    python -m benchmarks.cluster [--ranks 2 8] [--megabytes 43] [--calls 20] [--steps 0] [--backend jax]

Calls: ranks are actors that do nothing, so that only the calls are measured, which are made as updates are: the driver's CPU
time and the wall time of one.
Steps (--steps 20): a run of examples/arithmetic/grpo.gin in one process and on Ray with one rank, in turn, twice each: CPU
time of all their processes and wall time of a step, between the third step and the last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
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


def step_of(cluster: str, backend: str, steps: int) -> tuple[Counter[str], float]:
    """Seconds of CPU and of wall of a step of the example."""
    with tempfile.TemporaryDirectory() as folder:
        how = f"train.cluster = {cluster!r}", f"train.backend = {backend!r}", f"train.runs = {folder!r}"
        how = *how, "train.name = 'run'", "train.steps = 10000", "train.evaluate_every = 0", "train.checkpoint_every = 0"
        command = [sys.executable, "-m", "areal_x.train", "examples/arithmetic/grpo.gin", *(x for h in how for x in ("-b", h))]
        run, marks = Path(folder, "run"), {}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as driver:
            process = psutil.Process(driver.pid)
            while WARM + steps not in marks and driver.poll() is None:
                rows = read(run) if (run / "metrics.jsonl").exists() else []
                if rows and (step := int(rows[-1]["step"])) >= WARM:
                    marks.setdefault(step, (cpu_seconds(process), time.perf_counter()))
                time.sleep(0.02)
            driver.terminate()
    first, last = min(marks), max(marks)
    (cpu_then, then), (cpu_now, now) = marks[first], marks[last]
    taken = last - first
    return Counter({part: (x - cpu_then[part]) / taken for part, x in cpu_now.items()}), (now - then) / taken


def compare_steps(backend: str, steps: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {"here": [], "ray": []}
    for cluster in ("here", "ray", "ray", "here"):
        parts, wall = step_of(cluster, backend, steps)
        found[cluster].append((parts.total(), wall))
        shares = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items())
        cpu = 1e3 * parts.total()
        print(f"{backend}, {cluster}: {cpu:.0f} ms of CPU ({shares}) and {1e3 * wall:.0f} ms a step", flush=True)
    here, ray = (np.mean(found[cluster], axis=0) for cluster in ("here", "ray"))
    print(f"{backend}: on Ray {ray[0] / here[0]:.3f} × the CPU and {ray[1] / here[1]:.3f} × the time of one process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--megabytes", type=float, default=43)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--backend", default="jax")
    options = parser.parse_args()
    if options.steps:
        compare_steps(options.backend, options.steps)
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
