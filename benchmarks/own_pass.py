"""What the trainer saves if the step's own forward pass gives the proximal policy's log-probabilities: decoupled PPO with and
without a pass of its own before the step.

    python benchmarks/own_pass.py

Claim: a step without that pass takes at most 0.80 × the time of one with it, on either backend, and is the same step.

The work: from groups to the end of an optimizer step of decoupled PPO (make_batches and Trainer.update) of the random Qwen3 of
benchmarks/update.py (26M parameters, vocabulary 32,000, tied, fp32), on `--sequences` sequences of long-tailed lengths of which
three quarters are sampled, at log-probabilities near the model's.

Method: one trainer does both alternately, compiled and warmed up, `--rounds` times; the order changes from round to round. The
table shows the least seconds of the rounds, their ratio (other work on the machine only adds), and the median of the ratios of
neighbouring measurements; also in CPU seconds of all threads, which other work changes less. With OMP_NUM_THREADS=1 no thread
of torch spins. All metrics of the first round are compared; the learning rate is 1e-30.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from truncation import VOCABULARY
from update import CONFIG, ROW_LENGTH, draw_sequences, write_random

from areal_x.algorithms import losses
from areal_x.algorithms.mismatch import LagMetrics
from areal_x.algorithms.recipes import decoupled_ppo
from areal_x.batching.batch import Models, make_batches
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Episode, Group, Scored, Task, Trajectory

CLOCKS = {"seconds": time.perf_counter, "CPU": time.process_time}
WAYS = {"a pass before the step": False, "the step's own pass": True}


def groups_of(sequences: list[list[int]], size: int = 4) -> list[Group]:
    """Groups of `size` sequences with random rewards."""
    rng, episodes = np.random.default_rng(1), []
    for tokens in sequences:
        ids, prompt = np.array(tokens, np.int32), max(len(tokens) // 4, 1)
        logp = rng.normal(-np.log(VOCABULARY), 0.5, len(ids) - prompt).astype(np.float32)
        made = Trajectory.from_completion(ids[:prompt], ids[prompt:], logp, np.zeros(len(logp), np.int32), 1.0)
        episodes.append(Episode(Scored(float(rng.normal())), (made,)))
    firsts = range(0, len(episodes), size)
    return [Group(Task(str(i), ""), i, 0, tuple(episodes[i : i + size])) for i in firsts]


def measured(trainer: Trainer, groups: list[Group], rounds: int) -> dict[str, Any]:
    """Seconds of each way, their ratio, and the largest relative difference of loss and gradient norm."""
    algorithm = decoupled_ppo()
    watched = losses.policy_gap, LagMetrics(2)
    loss_of = {own_pass: losses.combine(algorithm.step_loss(own_pass), *watched) for own_pass in WAYS.values()}

    def step(own_pass: bool) -> dict[str, float]:
        (batch,) = make_batches(groups, algorithm, ROW_LENGTH, Models(trainer), version=1, own_pass=own_pass)
        return trainer.update(batch, loss_of[own_pass])

    took: dict[str, dict[str, list[float]]] = {clock: {way: [] for way in WAYS} for clock in CLOCKS}
    first: dict[str, dict[str, float]] = {}
    for number in range(rounds + 1):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            began = {clock: read() for clock, read in CLOCKS.items()}
            row = step(WAYS[way])
            if number:  # the first compiles
                for clock, read in CLOCKS.items():
                    took[clock][way].append(read() - began[clock])
            first.setdefault(way, row)
        print(f"round {number} of {rounds} is over", file=sys.stderr)
    differences = [abs(x[1] / x[0] - 1) for x in zip(*(first[way].values() for way in WAYS), strict=True) if x[0]]
    found: dict[str, Any] = {"largest difference of a metric": max(differences)}
    for clock, of_ways in took.items():
        before, own = of_ways.values()
        found[clock] = {
            "least": {way: min(times) for way, times in of_ways.items()},
            "ratio": min(own) / min(before),
            "median ratio": statistics.median(mine / theirs for mine, theirs in zip(own, before, strict=True)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=["jax", "torch"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    groups = groups_of(draw_sequences(VOCABULARY, args.sequences, args.mean_length))
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_random(Path(directory) / "model", CONFIG)
        for backend in args.backends:
            still = OptimizerConfig(learning_rate=1e-30, weight_decay=0.0)
            config = TrainerConfig(model=ModelConfig(str(path)), row_length=ROW_LENGTH, optimizer=still, micro_batch_rows=1)
            results[backend] = measured(create_trainer(backend, config), groups, args.rounds)
    for backend, found in results.items():
        for clock in CLOCKS:
            row = found[clock]
            times = ", ".join(f"{way} {least:.3f} s" for way, least in row["least"].items())
            print(f"{backend:6} {clock:8} {times}: {row['ratio']:.3f} × (median {row['median ratio']:.3f})")
        print(f"{backend:6} metrics differ by at most {found['largest difference of a metric']:.1e}")
    print(json.dumps({"benchmark": "own_pass", "results": results}))


if __name__ == "__main__":
    main()
