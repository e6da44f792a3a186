"""Compile time of the JAX trainer's step for a shallow and a deep model, and the number of programs that a run compiles.

    python benchmarks/jax_compile.py

Claim: the step of a model of 64 layers compiles in at most 1.2 times the time of one of 4, because layers are scanned; and
batches of different sizes share programs, one for each power of two of micro-batches.

Method: a Qwen3 with small widths (they do not affect XLA's compile time), the whole step with its forward and backward pass,
clipping and AdamW. A time is a new trainer's first update minus its second, with the cache of compiled programs off and that of
traced functions emptied, measured alternately, median of `--rounds`. The batches take 4 to 8 micro-batches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from update import CONFIG, packed, write_random

from areal_x.algorithms import losses
from areal_x.trainer import ModelConfig, TrainerConfig
from areal_x_jax.trainer import Trainer

DEPTHS = (4, 64)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 1000}
ROW_LENGTH, MICRO_BATCH_ROWS = 128, 2
SEQUENCES = (11, 20, 14, 18, 16)  # in each of five batches, each at most one row long


def trainer_of(directory: Path) -> Trainer:
    return Trainer(TrainerConfig(model=ModelConfig(str(directory)), micro_batch_rows=MICRO_BATCH_ROWS))


def compile_seconds(directory: Path) -> float:
    trainer, batch = trainer_of(directory), packed([np.arange(100)], ROW_LENGTH)
    jax.clear_caches()
    times = [time.perf_counter()]
    for _ in range(2):
        trainer.update(batch, losses.sft)
        times.append(time.perf_counter())
    return (times[1] - times[0]) - (times[2] - times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as root:
        models = {
            depth: write_random(Path(root) / str(depth), CONFIG | SMALL | {"num_hidden_layers": depth}) for depth in DEPTHS
        }
        seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        for _ in range(rounds):
            for depth, directory in models.items():
                seconds[depth].append(compile_seconds(directory))
        trainer, rng = trainer_of(models[DEPTHS[0]]), np.random.default_rng(0)
        for count in SEQUENCES:
            sequences = [rng.integers(0, 1000, length) for length in rng.integers(20, ROW_LENGTH, count)]
            trainer.update(packed(sequences, ROW_LENGTH), losses.sft)
    median = {depth: statistics.median(found) for depth, found in seconds.items()}
    print("| layers | seconds to compile the step | least | largest |\n|---|---|---|---|")
    for depth, found in seconds.items():
        print(f"| {depth} | {median[depth]:.2f} | {min(found):.2f} | {max(found):.2f} |")
    ratios = [deep / shallow for shallow, deep in zip(*seconds.values(), strict=True)]
    print(f"\n{DEPTHS[1]} layers take {statistics.median(ratios):.2f} times as long as {DEPTHS[0]} (target: at most 1.2)")
    print(f"{len(SEQUENCES)} batches of {', '.join(map(str, SEQUENCES))} sequences: {trainer.programs} programs")


if __name__ == "__main__":
    main()
