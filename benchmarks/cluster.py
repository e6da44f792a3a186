"""What a Ray cluster costs the driver: its start, and a call of all ranks with a batch.

    python -m benchmarks.cluster [--ranks 2 8] [--megabytes 43] [--calls 20]

Ranks are actors that do nothing, so that only the calls are measured: the driver's CPU time and the wall time of one.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import numpy as np

from areal_x.cluster.connection import connected
from areal_x.cluster.gang import Room
from areal_x.cluster.on_ray import RayGang
from areal_x.cluster.surroundings import surroundings
from areal_x.types import Batch

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--megabytes", type=float, default=43)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    batch = batch_of(options.megabytes)
    began = time.perf_counter()
    with connected(cpus=max(options.ranks)):
        print(f"Ray was up after {time.perf_counter() - began:.1f} s")
        for ranks in options.ranks:
            began = time.perf_counter()
            gang = RayGang("rank", ranks, Room(), partial(idle), surroundings(None))
            print(f"{ranks} ranks were up after {time.perf_counter() - began:.1f} s")
            spent, took = [], []
            for _ in range(options.calls):
                cpu, wall = time.process_time(), time.perf_counter()
                gang.call("update", batch)
                spent.append(time.process_time() - cpu)
                took.append(time.perf_counter() - wall)
            gang.end()
            print(f"{ranks} ranks: {1e3 * median(spent):.1f} ms of CPU and {1e3 * median(took):.1f} ms a call")


if __name__ == "__main__":
    main()
