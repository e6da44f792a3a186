"""One of several processes of a test: `python -m tests.torch.processes FOLDER ASKED …`, each JSON of a name, the
directories of a model and perhaps of its teacher, MeshConfig's fields, and perhaps those of LoRAConfig and of TrainerConfig.

For each: updates, everything else a trainer is asked, a save in both forms, and a save of what a restore of "one-NAME" gives,
in both forms, where that is there. All processes do the same; the first one writes what it found to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms import losses
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.mismatch import LagMetrics
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.batch import Models
from areal_x.batching.packing import pack
from areal_x.hf.image_format import DIRECTED
from areal_x.hf.model_dir import read_config
from areal_x.protocols.shares import own_rows
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Policy, Trajectory
from areal_x_torch import divide, join
from areal_x_torch.trainer import Trainer
from tests.anchored import ANCHORED
from tests.experts import recorded
from tests.kept import kept_with
from tests.models import PROMPTS, shown_to, with_images

UPDATES, VOCABULARY = 2, 40
IS_FIRST = os.environ.get("RANK", "0") == "0"
# Rows with several images and rows without any, in two batches of three.
SEEN, WITH_IMAGES = [*PROMPTS, (45,), (1, (1, 4, 6)), (44,)], (0, 1)
LENGTHS = (9, 5, 12, 3, 7, 2, 15, 4, 6)  # rows of unequal numbers of sequences: more passes on one process than on another
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, clip_norm=0.05, warmup_steps=2)


def value_loss(policy: Policy, batch: Batch) -> losses.LossTerms:
    return (policy.values - batch.advantages) ** 2 * batch.mask, {}


WATCHED = losses.policy_gap, LagMetrics(2)
ONE = losses.combine(losses.ppo_clip, ANCHORED, *WATCHED, partial(losses.entropy_bonus, coefficient=0.1))
TAUGHT = losses.combine(ONE, losses.divergence)


def shown(directory: Path, seed: int) -> list[Trajectory]:
    """Rows with several images that this model takes, and rows without any."""
    if read_config(directory)["model_type"] in DIRECTED:
        return with_images(*SEEN, image_like=False, seed=seed)
    return shown_to(directory, image_like=False, seed=seed) + with_images((45,), (44,), image_like=False, seed=seed)


def batch_of(seed: int, sees: Path | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    made = []
    for n in LENGTHS:
        prompt, answer = (rng.integers(0, VOCABULARY, count).astype(np.int32) for count in (1, n - 1))
        if sees:  # no token of an image
            prompt, answer = prompt % 5, answer % 5
        logprobs = rng.normal(-3.5, 0.3, n - 1).astype(np.float32)
        experts = recorded(n, seed, count=6) if n % 2 else None  # for a mixture, whose router chooses where there are none
        kept = kept_with(answer, 5 if sees else VOCABULARY, seed) if n % 3 else None
        versions = np.zeros(n - 1, np.int32)
        made.append(Trajectory.from_completion(prompt, answer, logprobs, versions, experts=experts, kept=kept))
    if sees and seed in WITH_IMAGES:
        made = shown(sees, seed)
    packed = pack(made, 64 if sees else 16)
    batch = packed.batch
    weights = np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32)
    advantages = packed.spread(rng.normal(size=len(made)).astype(np.float32))
    batch = batch.replace(ages=batch.segment_ids % 2)
    return batch.replace(proximal_logp=batch.behavior_logp, advantages=advantages, weights=weights)


def trainer_of(directory: str, mesh: dict[str, int], **changes: Any) -> Trainer:
    how: dict[str, Any] = {"mesh": MeshConfig(**mesh), "optimizer": OPTIMIZER, "micro_batch_rows": 1, "head_chunk": 8}
    return Trainer(TrainerConfig(model=ModelConfig(path=directory), **(how | changes)))


def models_of(
    directory: str, mesh: dict[str, int], teacher: str | None, lora: dict[str, Any], form: str, changes: dict[str, Any]
) -> Models:
    taught = {} if teacher is None else {"teacher": teacher, "divergence": partial(generalized_jsd, beta=0.5)}
    learns = {"lora": LoRAConfig(alpha=8.0, **lora)}
    policy = trainer_of(directory, mesh, checkpoint=form, entropy=True, **taught, **learns, **changes)
    rows = {"micro_batch_rows": policy.config.micro_batch_rows}
    reference = trainer_of(directory, mesh, frozen=True, **rows)
    return Models(policy, reference, trainer_of(directory, mesh, head="value", **learns, **rows))


def ask(models: Models, loss: losses.Loss, folder: Path, name: str, form: str, sees: Path | None) -> dict[str, Any]:
    """Everything that a run asks its trainers; arrays as lists. loss: the policy's. form: of its checkpoints."""
    policy, critic, reference = models.policy, models.critic, models.reference
    assert critic is not None
    assert reference is not None
    batches = [batch_of(step, sees) for step in range(UPDATES)]
    assert_shares_are_rows(policy, batches[0])
    found: dict[str, Any] = {"before": policy.logprobs(batches[0]).tolist()}
    found["updates"], found["kept"] = [], []
    for batch in batches:
        found["updates"].append(policy.update(batch, loss))
        found["kept"].append(kept_of(policy, batch))
    spoilt = batches[0].replace(weights=np.full_like(batches[0].weights, np.nan))
    found["skipped"] = policy.update(spoilt, loss)["skipped"]
    found["logp"] = policy.logprobs(batches[0]).tolist()
    found["reference"] = reference.logprobs(batches[0]).tolist()
    found["critic"] = [critic.update(batch, value_loss)["grad_norm"] for batch in batches[:2]]
    found["values"] = critic.values(batches[0]).tolist()
    found["critic weights"] = {tensor: x.tolist() for tensor, x in critic.weights()}
    save(policy, folder / name)
    found["weights"] = {tensor: x.tolist() for tensor, x in policy.weights()}
    # As the servers' transports take them: in a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        on_device = thread.submit(lambda: list(policy.device_weights())).result()
    found["on the device"] = {tensor: x.tolist() for tensor, x in on_device}
    snapshot = policy.snapshot()
    if not sees and IS_FIRST:  # the sampler is in the first process
        sampler = policy.sampler(2, 32)
        sampler.load(snapshot)
        snapshot = sampler.lanes[0].model.state_dict()
    found["drawn_with"] = {tensor: x.tolist() for tensor, x in snapshot.items()}
    found["version"] = policy.version
    if (one := folder / f"one-{name}").is_dir():
        policy.restore(one)
        save(policy, folder / f"back-{name}")
        found["logp of one"] = policy.logprobs(batches[0]).tolist()
        policy.update(batches[0], loss)
        if (parts := folder / f"sharded-one-{name}").is_dir():
            policy.restore(parts)
            save(policy, folder / f"resharded-{name}")
    saving = policy.save_in_background(folder / f"{form}-{name}")
    policy.update(batches[0], loss)  # while that writes
    if saving is not None:
        saving()
    return found


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


def main(to: str, *asked: str) -> None:
    folder, meshes = Path(to), [json.loads(mesh) for mesh in asked]
    if (processes := meshes[0].get("processes", 1)) > 1:
        join(processes)
    for mesh in meshes:
        name, directory, teacher = mesh.pop("name"), mesh.pop("directory"), mesh.pop("teacher", None)
        lora, changes = mesh.pop("lora", {}), mesh.pop("changes", {})
        lora |= {name: tuple(x) for name, x in lora.items() if name == "targets"}
        form = "portable" if lora else "sharded"
        models = models_of(directory, mesh, teacher, lora, form, changes)
        loss = ONE if teacher is None else TAUGHT
        sees = Path(directory) if "vision_config" in read_config(Path(directory)) else None
        found = ask(models, loss, folder, name, form, sees)
        if IS_FIRST:
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
