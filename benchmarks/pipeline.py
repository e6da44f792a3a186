"""The share of a step that stages of layers lose while rows enter and leave them, on virtual devices of a CPU.

    python -m benchmarks.pipeline [--stages 2 4] [--rounds 5]

Claim: with r rows that a device computes at once (trainer.micro_batch_rows), s stages lose (s - 1) / (r + s - 1) of the layers'
work.

The work: updates of a random Qwen3 of 12M parameters, almost all in its 16 layers, on one batch of full rows. The devices are
virtual and share the CPU's cores, so the time of a step is the work of all stages, also of those that have no rows. r takes its
values in turns; the time of the largest is the measure of what is not lost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROWS, LENGTH, AT_ONCE = 16, 128, (1, 2, 4, 16)
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16, "vocab_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}


def times(directory: Path, stages: int, rounds: int) -> dict[int, float]:
    """Seconds of a step by the rows at once, in a process with as many devices as stages."""
    import numpy as np

    from areal_x.algorithms import losses
    from areal_x.batching.packing import pack
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x.types import Trajectory
    from areal_x_jax.trainer import Trainer

    rng = np.random.default_rng(0)
    zeros = np.zeros(LENGTH - 1)
    made = [
        Trajectory.from_completion(x[:1], x[1:], zeros, zeros, 1.0)
        for x in rng.integers(0, SIZES["vocab_size"], (ROWS, LENGTH)).astype(np.int32)
    ]
    batch = pack(made, LENGTH).batch
    batch = batch.replace(weights=np.asarray(batch.mask, np.float32) / batch.mask.sum())
    trainers = {
        rows: Trainer(
            TrainerConfig(
                ModelConfig(str(directory)), OptimizerConfig(), MeshConfig(stage=stages, data=1), micro_batch_rows=rows
            )
        )
        for rows in AT_ONCE
    }
    took: dict[int, list[float]] = {rows: [] for rows in AT_ONCE}
    for number in range(rounds + 1):
        for rows, trainer in trainers.items():
            began = time.perf_counter()
            trainer.update(batch, losses.sft)
            if number:  # the first compiles
                took[rows].append(time.perf_counter() - began)
    return {rows: median(of) for rows, of in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        directory, stages = options.within
        print(json.dumps(times(Path(directory), int(stages), options.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), trust_remote_code=False).save_pretrained(
            folder
        )
        for stages in options.stages:
            command = [sys.executable, "-m", "benchmarks.pipeline", "--rounds", str(options.rounds)]
            flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={stages}"}
            said = subprocess.run(
                [*command, "--within", folder, str(stages)], env=os.environ | flags, capture_output=True, text=True, check=True
            ).stdout
            took = {int(rows): seconds for rows, seconds in json.loads(said.splitlines()[-1]).items()}
            most = max(took)
            whole = took[most] * most / (most + stages - 1)  # what a step without any loss would take
            for rows, seconds in took.items():
                lost, expected = 1 - whole / seconds, (stages - 1) / (rows + stages - 1)
                shares = f"{lost:.1%} lost, by the formula {expected:.1%}"
                print(f"{stages} stages, {rows} rows at once: {seconds:.3f} s a step, {shares}")


if __name__ == "__main__":
    main()
