"""The trainer's pause at a publication to vLLM servers, as a share of its step.

    python benchmarks/pauses.py [--backends jax torch] [--ranks 0 2] [--steps 8] [--tokens 4000]

Claim: the pause is the time of a copy, at most 5 % of a step, at 26M parameters on a CPU.

The work: the model and the batch of benchmarks/update.py (26M parameters in fp32, 105 MB; 16 sequences, about 4,000 tokens).
After each step the weights are published through a VLLMEngine without servers, as a run does it: the trainer is paused for
`stage`, takes its next step while the files are written, and waits for them before the next publication. `--ranks 2`: the
trainer is two processes on Ray with mesh.fsdp = 2; 0: in this process.

Printed, as medians over the steps after the first two, in seconds: the step; the pause; how long the pause would be if the
trainer waited for the files (as it does here after every other step); and both as shares of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_x.algorithms import losses
from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.trainers import trainers_on_ray
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, TrainerConfig
from areal_x.types import Batch

NOWHERE = "http://127.0.0.1:9"  # no server is asked for anything


@contextmanager
def trainer_of(backend: str, ranks: int, model: Path) -> Iterator[Trainer]:
    config = TrainerConfig(ModelConfig(str(model)), row_length=1024)
    if not ranks:
        yield create_trainer(backend, config)
        return
    mesh = MeshConfig(processes=ranks, fsdp=ranks, data=1)
    config = TrainerConfig(ModelConfig(str(model)), row_length=1024, mesh=mesh)
    with trainers_on_ray(backend, {"policy": config}, {"policy": losses.sft}, ClusterConfig()) as made:
        yield made["policy"]


def measure(trainer: Trainer, batch: Batch, model: Path, folder: Path, steps: int) -> dict[str, float]:
    engine = VLLMEngine(VLLMConfig(urls=(NOWHERE,)), model, folder, print)
    engine.stager.open()
    rows: dict[str, list[float]] = {"step": [], "pause": [], "with files": []}
    written = None
    try:
        for step in range(2 * steps + 2):
            began = time.perf_counter()
            trainer.update(batch, losses.sft)
            updated = time.perf_counter()
            if written is not None:
                written.files.result()
            staging = time.perf_counter()
            written = engine.stage(trainer)
            paused = time.perf_counter()
            if alone := step % 2:
                written.files.result()
            ended = time.perf_counter()
            if step >= 2:
                rows["pause"].append(paused - staging)
                if alone:
                    rows["with files"].append(ended - staging)
                rows["step"].append(updated - began)
    finally:
        engine._end_processes()
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return medians | {"share": medians["pause"] / medians["step"], "share with files": medians["with files"] / medians["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000, help="of a step, about")
    options = parser.parse_args()
    from update import CONFIG, draw_sequences, packed, write_random

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "model", CONFIG)
        batch = packed(draw_sequences(CONFIG["vocab_size"], 16, options.tokens // 16))
        for ranks in options.ranks:
            for backend in options.backends:
                with trainer_of(backend, ranks, model) as trainer:
                    found = measure(trainer, batch, model, Path(folder), options.steps)
                name = f"{backend}, {f'{ranks} ranks' if ranks else 'one process'}"
                print(f"{name:20} " + "  ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
                results[name] = found
    print(json.dumps({"benchmark": "pauses", "results": results}))


if __name__ == "__main__":
    main()
