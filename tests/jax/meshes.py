"""The same updates on several meshes of eight devices: what a test asserts and a benchmark prints.

`python -m tests.jax.meshes MODEL LORA MESH …` prints what `learn` gives on each, a mesh being JSON of MeshConfig's fields, and
LORA of LoRAConfig's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import pack
from areal_x.hf.model_dir import read_config
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Trajectory
from areal_x_jax.architecture import read_architecture
from areal_x_jax.trainer import Trainer
from areal_x_jax.vision_architecture import VisionArchitecture
from tests.anchored import ANCHORED
from tests.conftest import python_with
from tests.kept import kept_with
from tests.models import IMAGE, SQUARE, of_form

ROWS, LENGTH, UPDATES = 16, 32, 10
LOSS = losses.combine(losses.ppo_clip, ANCHORED)
KEPT = 256  # pairs of a row, as many in each batch, so that one program serves all


def batch_of(vocab: int, seed: int, tower: VisionArchitecture | None = None) -> Batch:
    """Sequences of 3 to 20 tokens, packed, with advantages; three more with images, if a tower takes them."""
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(3, 20, 30):
        prompt = int(length) // 3
        tokens = rng.integers(IMAGE + 1 if tower else 0, vocab, length).astype(np.int32)
        logprobs = -rng.exponential(2.0, length - prompt)
        kept = kept_with(tokens[prompt:], vocab, seed) if length % 3 else None
        versions = np.zeros(length - prompt)
        made.append(Trajectory.from_completion(tokens[:prompt], tokens[prompt:], logprobs, versions, 1.0, kept=kept))
    if tower is not None:
        squares = (3, SQUARE), (SQUARE, 2, SQUARE), (SQUARE,)
        others = (3, (1, 4, 6)), ((1, 2, 2), 2, (2, 2, 2)), ((1, 6, 4),)
        made += of_form(tower.form, *(squares if tower.form.side else others), answer=5, seed=seed)
    packed = pack(made, LENGTH, ROWS)
    batch, advantages = packed.batch, packed.spread(rng.normal(size=len(made)))
    pairs = np.full((ROWS, KEPT, 2), -1, np.int32)
    pairs[:, : batch.kept.shape[1]] = batch.kept
    batch = batch.replace(kept=pairs)
    weights = np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32)
    return batch.replace(advantages=advantages, weights=weights, proximal_logp=batch.behavior_logp)


def learn(directory: Path, mesh: dict[str, int], lora: LoRAConfig | None = None) -> dict[str, Any]:
    """Losses and gradient norms of UPDATES steps, then log-probabilities, how many programs the steps took, and how much of the
    parameters lies on the first device."""
    experts = read_architecture(read_config(directory)).experts
    corrected = experts is not None and experts.router.corrected
    at_once = ROWS // 2 // np.prod([mesh.get(axis, 1) for axis in ("data", "fsdp", "expert")], dtype=int)
    trainer = Trainer(
        TrainerConfig(
            model=ModelConfig(path=str(directory)),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4),
            mesh=MeshConfig(**mesh),
            lora=lora or LoRAConfig(),
            micro_batch_rows=max(int(at_once), 1),
            head_chunk=32,
            balance_rate=0.01 if corrected else 0.0,
        )
    )
    of_model = partial(batch_of, trainer.arch.vocab, tower=trainer.arch.vision)
    learned, on_devices = [], []
    for step in range(UPDATES):
        batch = of_model(step)
        before = trainer.logprobs(batch) if step == UPDATES - 1 else None
        learned.append(trainer.update(batch, LOSS))
        if before is not None:
            np.testing.assert_allclose(trainer.step_logprobs(), np.where(batch.mask, before, 0), rtol=0, atol=1e-5)
            np.testing.assert_array_equal(trainer.step_share("logprobs"), trainer.step_logprobs())  # one process has all
        if mesh and step == UPDATES // 2:  # the others are of a trainer that never rested
            on_devices.append(trainer.device_bytes())
            trainer.rest()
            on_devices.append(trainer.device_bytes())
            trainer.wake()
            on_devices.append(trainer.device_bytes())
    leaves = jax.tree.leaves(trainer.params)
    here = sum(leaf.addressable_shards[0].data.size for leaf in leaves) / sum(leaf.size for leaf in leaves)
    logp = trainer.logprobs(of_model(0))
    return {
        "loss": [row["loss"] for row in learned],
        "grad_norm": [row["grad_norm"] for row in learned],
        "violation": [row.get("expert_max_violation", 0.0) for row in learned],
        "logp": logp.tolist(),
        "programs": trainer.programs,
        "share": here,
        "on devices": on_devices,
    }


def learn_on(
    directory: Path, meshes: Sequence[dict[str, int]], lora: LoRAConfig | None = None, **environment: str
) -> list[dict[str, Any]]:
    """Returns the result of `learn` on each mesh, from a process with eight devices."""
    arguments = [str(directory), json.dumps(asdict(lora or LoRAConfig())), *map(json.dumps, meshes)]
    said = python_with(8, "-m", "tests.jax.meshes", *arguments, **environment)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def leave_together(processes: int) -> None:
    """Ends this process when the others are done too: JAX aborts one that outlives the first."""
    if processes > 1:
        multihost_utils.sync_global_devices("done")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    directory, lora, *meshes = sys.argv[1:]
    for mesh in meshes:
        print(json.dumps(learn(Path(directory), json.loads(mesh), LoRAConfig(**json.loads(lora)))), flush=True)
