"""One of several processes that train tiny models on meshes, each compared with one device:
`python -m tests.torch.family_meshes FOLDER ASKED …`, each JSON of a name, the directory of a model, MeshConfig's fields, and
whether adapters of all its kernels are trained in place of its parameters.

The first process writes to FOLDER/NAME.json how far two updates on the mesh are from those on one device, or why the mesh is
refused. One pair of processes does this for many models, because a pair takes longer to start than a model to be trained.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms.losses import ppo_clip
from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_torch import join, loading, trainer
from areal_x_torch.lora import adaptable, adaptable_experts
from areal_x_torch.trainer import Trainer

from .processes import IS_FIRST, UPDATES, batch_of

# Each group of processes has threads of its own, which wait by polling: those of hundreds of meshes would leave no time.
trainer.make_mesh = cache(trainer.make_mesh)
# Adam's steps with this eps grow with gradients, whose factors would otherwise not show.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, clip_norm=0.0)


def trainer_of(directory: str, mesh: dict[str, int], adapted: bool) -> Trainer:
    lora = LoRAConfig()
    if adapted:
        model = loading.build(Path(directory), "policy")
        targets = {name.rpartition(".")[2] for name in adaptable(model)}
        targets |= {EXPERTS + kernel for _, kernel in adaptable_experts(model)}
        lora = LoRAConfig(rank=3, alpha=6.0, targets=tuple(sorted(targets)))
    config = {"model": ModelConfig(path=directory), "mesh": MeshConfig(**mesh), "optimizer": OPTIMIZER, "lora": lora}
    return Trainer(TrainerConfig(**config, micro_batch_rows=4, head_chunk=8))


def outcome(made: Trainer) -> dict[str, Any]:
    """Returns numbers of updates of packed rows, log-probabilities after them, and what was trained."""
    batches = [batch_of(step) for step in range(UPDATES)]
    before = made.logprobs(batches[0])
    updates = [made.update(batch, ppo_clip) for batch in batches]
    numbers = {f"{name} {step}": update[name] for step, update in enumerate(updates) for name in ("loss", "grad_norm")}
    trained = dict(made.adapter() if made.config.lora.rank else made.weights())
    return {**numbers, "before": before, "after": made.logprobs(batches[0]), **trained}


def deviation(found: Any, expected: Any) -> float:
    """Returns the largest deviation, as a part of the largest number."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-3))


def main(to: str, *asked: str) -> None:
    meshes = [json.loads(mesh) for mesh in asked]
    join(meshes[0]["processes"])
    alone: dict[tuple[str, bool], dict[str, Any]] = {}
    for mesh in meshes:
        name, which = mesh.pop("name"), (mesh.pop("directory"), mesh.pop("adapted"))
        found: dict[str, Any]
        try:
            on_mesh = outcome(trainer_of(which[0], mesh, which[1]))
        except ConfigError as refusal:
            found = {"refused": str(refusal)}
        else:
            if not IS_FIRST:
                continue
            if which not in alone:
                alone[which] = outcome(trainer_of(which[0], {}, which[1]))
            assert on_mesh.keys() == alone[which].keys()
            found = {part: deviation(on_mesh[part], x) for part, x in alone[which].items()}
        if IS_FIRST:
            (Path(to) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
