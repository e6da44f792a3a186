"""One of several processes of a test: `python -m tests.jax.processes MODEL FOLDER MESH …`, a mesh being JSON of
MeshConfig's fields, the optimizer and a name.

On each mesh: updates, everything else a trainer is asked, a save, and a save of what a restore of "one-NAME" gives, where there
is one. All processes do the same; the first one writes what it found to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms import losses
from areal_x.batching.batch import Models
from areal_x.protocols.shares import own_rows
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_jax import divide, join
from areal_x_jax.parameters import Params
from areal_x_jax.trainer import Trainer

from .meshes import batch_of, leave_together

UPDATES, VOCABULARY = 4, 64
IS_FIRST = os.environ.get("RANK", "0") == "0"


def value_loss(policy: Policy, batch: Batch) -> losses.LossTerms:
    return (policy.values - batch.advantages) ** 2 * batch.mask, {}


def make_models(directory: Path, optimizer: str, mesh: dict[str, int]) -> Models:
    rows = int(np.prod([mesh.get(axis, 1) for axis in ("data", "fsdp", "expert")], dtype=int))

    def trainer(**changes: Any) -> Trainer:
        steps = OptimizerConfig(name=optimizer, learning_rate=1e-3, warmup_steps=4)
        how: dict[str, Any] = {"mesh": MeshConfig(**mesh), "micro_batch_rows": max(8 // rows, 1), "head_chunk": 32}
        return Trainer(TrainerConfig(model=ModelConfig(path=str(directory)), optimizer=steps, **how, **changes))

    if optimizer != "adamw":  # once is enough
        return Models(trainer(entropy=True))
    return Models(trainer(entropy=True), trainer(frozen=True), trainer(head="value"))


def ask(models: Models, folder: Path, name: str) -> dict[str, Any]:
    """Everything that a run asks its trainers; arrays as lists."""
    batches = [batch_of(VOCABULARY, step) for step in range(UPDATES)]
    assert_shares_are_rows(models.policy, batches[0])
    learned, kept = [], []
    for batch in batches:
        learned.append(models.policy.update(batch, losses.ppo_clip))
        kept.append(kept_of(models.policy, batch))
    save(models.policy, folder / name)
    found = {
        "loss": [row["loss"] for row in learned],
        "grad_norm": [row["grad_norm"] for row in learned],
        "kept": kept,
        "logp": models.policy.logprobs(batches[0]).tolist(),
        "weights": {tensor: float(np.abs(x).sum()) for tensor, x in models.policy.weights()},
        "snapshot": float(np.abs(np.asarray(sampled_from(models.policy)["embed"])).sum()),
    }
    if models.critic is not None:
        of_critic = models.critic.update(batches[0], value_loss)
        found["critic"] = [of_critic["loss"], of_critic["grad_norm"]]
        found["reference"] = models.reference.logprobs(batches[0]).tolist()
        found["values"] = models.critic.values(batches[0]).tolist()
    if (one := folder / f"one-{name}").is_dir():
        models.policy.restore(one)
        save(models.policy, folder / f"back-{name}")
    return found | {"version": models.policy.version}


def assert_shares_are_rows(trainer: Trainer, batch: Batch) -> None:
    """Asserts that what this process computes of its rows alone is what all compute of them, also where it has none."""
    for rows in (len(batch.tokens), 1):
        some = batch.map(lambda x, rows=rows: x[:rows])
        division = divide(trainer.config, some, trainer.shares.count, "outputs")
        own = division.rows(trainer.shares.own)
        outputs = trainer.outputs_share("logprobs", own_rows(some, own), division.whole)
        assert (outputs == trainer.logprobs(some)[own]).all()


def kept_of(trainer: Trainer, batch: Batch) -> list[Any]:
    """The log-probabilities and entropies of the last step, of which this process alone returns its rows."""
    found: list[Any] = [trainer.step_logprobs(), trainer.step_entropies()]
    own = divide(trainer.config, batch, trainer.shares.count, "update").rows(trainer.shares.own)
    for output, of_all in zip(("logprobs", "entropies"), found, strict=True):
        assert (trainer.step_share(output) == of_all[own]).all()
    return [x.tolist() for x in found]


def save(trainer: Any, directory: Path) -> None:
    trainer.save(directory if IS_FIRST else None)


def sampled_from(trainer: Any) -> Params:
    """Returns the parameters in the first lane of the trainer's sampler, which is in the first process."""
    snapshot = trainer.snapshot()
    if not IS_FIRST:
        return {"embed": np.zeros(())}
    sampler = trainer.sampler(8, 32)
    sampler.load(snapshot)
    params: Params = sampler.lanes[0]._params[0]
    return params


def main(directory: str, folder: str, *asked: str) -> None:
    meshes = [json.loads(mesh) for mesh in asked]
    if (processes := meshes[0].get("processes", 1)) > 1:
        join(processes)
    for mesh in meshes:
        name, optimizer = mesh.pop("name"), mesh.pop("optimizer")
        found = ask(make_models(Path(directory), optimizer, mesh), Path(folder), name)
        if IS_FIRST:
            (Path(folder) / f"{name}.json").write_text(json.dumps(found))
    leave_together(processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
