"""The share of a step that stages of layers lose while rows enter and leave them.

    python -m benchmarks.pipeline [--backend jax torch] [--stages 2 4] [--chunks 1 2] [--rounds 5]

Claim: s stages of c chunks each (mesh.stage, mesh.stage_chunks) lose (s - 1) / (r · c + s - 1) of the layers' time, where r
is with JAX the rows that a device computes at once (trainer.micro_batch_rows), and with torch the micro-batches of a step; at
least as many as stages, if c is not 1.

The work: updates of a random Qwen3 of 12M parameters, almost all in its 16 layers, on one batch of full rows. r takes its
values in turns. JAX's devices are virtual and share the CPU's cores, so the processor time of a step is the work of all stages,
also of those that have no rows; the time of the largest r is the measure of what is not lost, of each number of chunks alone,
so that what chunks cost beside is seen in the seconds of a step. torch's stages are processes, more than there are cores: each
measures the processor time of each chunk's forward and backward passes, and what is lost follows from these and the order in
which they are computed, as if each stage had a device and sending took no time. It is also counted for backward passes that
take twice the time of forward ones.
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
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROWS, LENGTH, AT_ONCE = 16, 128, (1, 2, 4, 16)
MICRO_BATCHES = 2, 4, 8
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16, "vocab_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}


Took = Callable[[str, int, int], float]
"""Seconds of a forward ("F") or backward ("B") pass of a micro-batch through a chunk."""


def twice_as_long_back(kind: str, *_: int) -> float:
    return {"F": 1.0, "B": 2.0}[kind]


def waiting(stages: int, chunks: int, micro_batches: int, took: Took = twice_as_long_back) -> float:
    """The share of a step that torch's stages wait on average, if nothing but computing takes time."""
    from areal_x_torch.pipeline_schedule import order

    left = [[a for a in actions if a.kind in "FB"][::-1] for actions in order(stages, chunks, micro_batches)]
    busy = sum(took(*action) for actions in left for action in actions)
    last, clock, ends = stages * chunks - 1, [0.0] * stages, dict[tuple[str, int, int], float]()
    while any(left):
        for stage, actions in enumerate(left):
            while actions:
                kind, chunk, number = actions[-1]
                before = (kind, chunk - 1, number) if kind == "F" else (kind, chunk + 1, number)
                if chunk != (0 if kind == "F" else last) and before not in ends:
                    break
                clock[stage] = max(clock[stage], ends.get(before, 0.0)) + took(kind, chunk, number)
                ends[actions.pop()] = clock[stage]
    return 1 - busy / (stages * max(clock))


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


def torch_times(directory: Path, stages: int, chunks: int, rounds: int) -> dict[int, dict[str, float]]:
    """Processor seconds of one stage's passes, "kind chunk number", by the number of micro-batches; in one of as many
    processes as stages."""
    import torch

    from areal_x.algorithms import losses
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x_torch import forward, join
    from areal_x_torch.pipeline_schedule import Run, order
    from areal_x_torch.trainer import Trainer

    torch.set_num_threads(1)
    join(stages)
    measured: list[tuple[str, float]] = []

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            found = function(*arguments)
            measured.append((kind, time.process_time() - began))
            return found

        return call

    forward.Run = lambda **how: Run(**how | {"compute": timed("F", how["compute"])})  # type: ignore[misc, assignment]
    torch.autograd.backward = timed("B", torch.autograd.backward)
    mesh = MeshConfig(stage=stages, stage_chunks=chunks, processes=stages)
    trainer = Trainer(TrainerConfig(ModelConfig(str(directory)), OptimizerConfig(), mesh, micro_batch_rows=1))
    took: dict[int, list[list[float]]] = {count: [] for count in MICRO_BATCHES}
    actions = {count: order(stages, chunks, count)[int(os.environ["RANK"])] for count in MICRO_BATCHES}
    computed = {count: [a for a in of if a.kind in "FB"] for count, of in actions.items()}
    for number in range(rounds + 1):
        for count in MICRO_BATCHES:
            measured.clear()
            trainer.update(batch_of(count), losses.sft)
            assert [kind for kind, _ in measured] == [a.kind for a in computed[count]]
            if number:
                took[count].append([seconds for _, seconds in measured])
    return {
        count: {" ".join(map(str, a)): median(of) for a, of in zip(computed[count], zip(*rows, strict=True), strict=True)}
        for count, rows in took.items()
    }


def times(directory: Path, stages: int, chunks: int, rounds: int) -> dict[int, float]:
    """Processor seconds of a step by the rows at once, in a process with as many devices as stages."""
    from areal_x.algorithms import losses
    from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from areal_x_jax.trainer import Trainer

    batch = batch_of(ROWS)
    mesh = MeshConfig(stage=stages, stage_chunks=chunks, data=1)
    trainers = {
        rows: Trainer(TrainerConfig(ModelConfig(str(directory)), OptimizerConfig(), mesh, micro_batch_rows=rows))
        for rows in AT_ONCE
    }
    took: dict[int, list[float]] = {rows: [] for rows in AT_ONCE}
    for number in range(rounds + 1):
        for rows, trainer in trainers.items():
            began = time.process_time()
            trainer.update(batch, losses.sft)
            if number:  # the first compiles
                took[rows].append(time.process_time() - began)
    return {rows: median(of) for rows, of in took.items()}


def read(said: str) -> dict[int, Any]:
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
    took: dict[int, dict[str, float]] = {count: {} for count in MICRO_BATCHES}
    for process in made:
        for count, seconds in read(process.communicate()[0]).items():
            took[count] |= seconds
    for count, of_count in took.items():
        measured = waiting(stages, chunks, count, lambda *action, of=of_count: of[" ".join(map(str, action))])
        counted, by_formula = waiting(stages, chunks, count), (stages - 1) / (count * chunks + stages - 1)
        shares = f"{measured:.1%} lost, counted {counted:.1%}, by the formula {by_formula:.1%}"
        print(f"torch, {stages} stages of {chunks}, {count} micro-batches: {shares}", flush=True)


def report_jax(command: list[str], stages: int, chunks: int) -> None:
    from areal_x_jax.pipeline import turns

    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={stages}"}
    said = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True).stdout
    took = read(said)
    most = max(took)
    whole = took[most] * most * chunks / turns(most, stages, chunks)  # what a step without any loss would take
    for rows, seconds in took.items():
        lost, counted = 1 - whole / seconds, 1 - rows * chunks / turns(rows, stages, chunks)
        by_formula = (stages - 1) / (rows * chunks + stages - 1)
        shares = f"{lost:.1%} lost, counted {counted:.1%}, by the formula {by_formula:.1%}"
        print(f"JAX, {stages} stages of {chunks}, {rows} rows at once: {seconds:.3f} processor s a step, {shares}", flush=True)


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
            took: Any = torch_times(Path(directory), int(stages), int(chunks), options.rounds)
        else:
            took = times(Path(directory), int(stages), int(chunks), options.rounds)
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
        if "jax" in options.backend:
            for stages, chunks in product(options.stages, options.chunks):
                report_jax([*command, str(stages), str(chunks), "--backend", "jax"], stages, chunks)


if __name__ == "__main__":
    main()
