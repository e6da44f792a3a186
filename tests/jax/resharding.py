"""One of the processes of a test of sharded checkpoints: `python -m tests.jax.resharding MODEL FOLDER OPTIMIZER MESH …`.

On the first mesh, JSON of MeshConfig's fields, two updates, a sharded checkpoint in FOLDER/sharded, the same state in portable
form in FOLDER/portable, and another update while the first is still written. Each other mesh, of one process alone, reads the
sharded one and writes what it read to FOLDER/0, FOLDER/1, …
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from areal_x.algorithms import losses
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_jax import join
from areal_x_jax.trainer import Trainer

from .meshes import batch_of, leave_together


def make_trainer(directory: str | Path, optimizer: str, mesh: dict[str, int]) -> Trainer:
    steps = OptimizerConfig(name=optimizer, learning_rate=1e-3)
    model = ModelConfig(path=str(directory))
    return Trainer(TrainerConfig(model, steps, MeshConfig(**mesh), checkpoint="sharded", micro_batch_rows=2))


def main(directory: str, folder: str, optimizer: str, *asked: str) -> None:
    mesh, *others = (json.loads(mesh) for mesh in asked)
    if (processes := mesh.get("processes", 1)) > 1:
        join(processes)
    is_first = os.environ.get("RANK", "0") == "0"
    trainer = make_trainer(directory, optimizer, mesh)
    for step in range(2):
        trainer.update(batch_of(64, step), losses.ppo_clip)
    (Path(folder) / "sharded").mkdir(exist_ok=True)
    wait = trainer.save_in_background(Path(folder) / "sharded")
    trainer.save(Path(folder) / "portable" if is_first else None)
    trainer.update(batch_of(64, 2), losses.ppo_clip)
    assert wait is not None
    wait()
    leave_together(processes)
    for number, other in enumerate(others):
        reader = make_trainer(directory, optimizer, other)
        reader.restore(Path(folder) / "sharded")
        reader.save(Path(folder) / str(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
