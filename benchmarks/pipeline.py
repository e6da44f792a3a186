"""The share of a step that stages of layers lose while rows enter and leave them.

    python -m benchmarks.pipeline [--backend jax torch] [--stages 2 4] [--chunks 1 2] [--rounds 5]

Claim: s stages of c chunks each (mesh.stage, mesh.stage_chunks) lose (s - 1) / (r · c + s - 1) of the layers' time, where r
is with JAX the rows that a device computes at once (trainer.micro_batch_rows), and with torch the micro-batches of a step.

The work: updates of a random Qwen3 of 12M parameters, almost all in its 16 layers, on one batch of full rows. r takes its
values in turns; the time of the largest is the measure of what is not lost. JAX's devices are virtual and share the CPU's
cores, so the time of a step is the work of all stages, also of those that have no rows. torch's are processes of one thread
each, which need a core each: the share is counted too, from the order in which they compute, if a backward pass takes twice
the time of a forward one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROWS, LENGTH, AT_ONCE = 16, 128, (1, 2, 4, 16)
MICRO_BATCHES = 2, 4, 16
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16, "vocab_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}


def waiting(stages: int, chunks: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """The share of a step that torch's stages wait, if nothing but computing takes time. forward, backward: of a micro-batch
    through all chunks of a stage."""
    from areal_x_torch.pipeline_schedule import order

    left = [[a for a in actions if a.kind in "FB"][::-1] for actions in order(stages, chunks, micro_batches)]
    last, clock, ends = stages * chunks - 1, [0.0] * stages, dict[tuple[str, int, int], float]()
    while any(left):
        for stage, actions in enumerate(left):
            while actions:
                kind, chunk, number = actions[-1]
                before = (kind, chunk - 1, number) if kind == "F" else (kind, chunk + 1, number)
                if chunk != (0 if kind == "F" else last) and before not in ends:
                    break
                took = (forward if kind == "F" else backward) / chunks
                clock[stage] = max(clock[stage], ends.get(before, 0.0)) + took
                ends[actions.pop()] = clock[stage]
    return 1 - micro_batches * (forward + backward) / max(clock)


def batch_of(rows: int) -> Any:
    """Full rows."""
    import numpy as np

    from areal_x.batching.packing import pack
    from areal_x.types import Trajectory

    rng = np.random.default_rng(0)
    zeros = np.zeros(LENGTH - 1)
    made = [
        Trajectory.from_completion(x[:1], x[1:], zeros, zeros, 1.0)
        for x in rng.integers(0, SIZES["vocab_size"], (rows, LENGTH)).astype(np.int32)
    ]
    batch = pack(made, LENGTH).batch
    return batch.replace(weights=np.asarray(batch.mask, np.float32) / batch.mask.sum())


def torch_times(directory: Path, stages: int, chunks: int, rounds: int) -> dict[int, float]:
    """Seconds of a micro-batch by their number, in one of as many processes as stages."""
    import torch

    from areal_x.algorithms import losses
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x_torch import join
    from areal_x_torch.trainer import Trainer

    torch.set_num_threads(1)
    join(stages)
    mesh = MeshConfig(stage=stages, stage_chunks=chunks, processes=stages)
    trainer = Trainer(TrainerConfig(ModelConfig(str(directory)), OptimizerConfig(), mesh, micro_batch_rows=1))
    took: dict[int, list[float]] = {count: [] for count in MICRO_BATCHES}
    for number in range(rounds + 1):
        for count in MICRO_BATCHES:
            batch = batch_of(count)
            began = time.perf_counter()
            trainer.update(batch, losses.sft)
            if number:
                took[count].append((time.perf_counter() - began) / count)
    return {count: median(of) for count, of in took.items()}


def times(directory: Path, stages: int, rounds: int) -> dict[int, float]:
    """Seconds of a step by the rows at once, in a process with as many devices as stages."""
    from areal_x.algorithms import losses
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x_jax.trainer import Trainer

    batch = batch_of(ROWS)
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


def read(said: str) -> dict[int, float]:
    return {int(rows): seconds for rows, seconds in json.loads(said.splitlines()[-1]).items()}


def report_torch(command: list[str], stages: int, chunks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    made = [
        subprocess.Popen(command, env=os.environ | group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(stages)
    ]
    said = [process.communicate()[0] for process in made]
    took = read(said[0])
    most = max(took)
    whole = took[most] * (1 - waiting(stages, chunks, most))
    for count, seconds in took.items():
        by_formula = (stages - 1) / (count * chunks + stages - 1)
        shares = (
            f"{1 - whole / seconds:.1%} lost, counted {waiting(stages, chunks, count):.1%}, by the formula {by_formula:.1%}"
        )
        print(f"torch, {stages} stages of {chunks}, {count} micro-batches: {seconds:.3f} s a micro-batch, {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["jax", "torch"], nargs="+", default=["jax", "torch"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        directory, stages, chunks = options.within
        if options.backend == ["torch"]:
            took = torch_times(Path(directory), int(stages), int(chunks), options.rounds)
        else:
            took = times(Path(directory), int(stages), options.rounds)
        print(json.dumps(took))
        return
    with tempfile.TemporaryDirectory() as folder:
        from transformers import AutoConfig, AutoModelForCausalLM

        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), trust_remote_code=False).save_pretrained(
            folder
        )
        command = [sys.executable, "-m", "benchmarks.pipeline", "--rounds", str(options.rounds), "--within", folder]
        if "torch" in options.backend:
            for stages, chunks in product(options.stages, options.chunks):
                report_torch([*command, str(stages), str(chunks), "--backend", "torch"], stages, chunks)
        for stages in options.stages if "jax" in options.backend else ():
            flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={stages}"}
            said = subprocess.run(
                [*command, str(stages), "1", "--backend", "jax"],
                env=os.environ | flags,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            took = read(said)
            most = max(took)
            whole = took[most] * most / (most + stages - 1)  # what a step without any loss would take
            for rows, seconds in took.items():
                lost, expected = 1 - whole / seconds, (stages - 1) / (rows + stages - 1)
                shares = f"{lost:.1%} lost, by the formula {expected:.1%}"
                print(f"{stages} stages, {rows} rows at once: {seconds:.3f} s a step, {shares}")


if __name__ == "__main__":
    main()
