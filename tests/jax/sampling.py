"""Samples on a mesh, for a test: `python -m tests.jax.sampling MODEL FILE MESH`, the mesh being JSON of MeshConfig's
fields.

After an update, all slots are drawn to the end, the trainer goes on, and they are drawn once more from the same snapshot; then
twice with guesses of the model before the updates. Of a model that sees, prompts with images are sampled once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from areal_x.algorithms import losses
from areal_x.hf.model_dir import read_config
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x_jax.trainer import Trainer
from tests.sampled_images import in_slot, requests_of

from .meshes import batch_of

SLOTS, CONTEXT = 16, 96


def drawn(sampler: Sampler, snapshot: Any) -> list[tuple[list[int], list[float]]]:
    """Each slot's tokens and log-probabilities."""
    sampler.load(snapshot)
    said = sample_to_end(sampler, [slot_request(slot, 3 + 4 * slot, 5 + slot, seed=slot) for slot in range(SLOTS)])
    return [said[slot] for slot in range(SLOTS)]


def sample(directory: str | Path, mesh: dict[str, int]) -> dict[str, Any]:
    steps = OptimizerConfig(learning_rate=1e-3)
    trainer = Trainer(TrainerConfig(ModelConfig(str(directory)), steps, MeshConfig(**mesh), micro_batch_rows=2))
    trainer.update(batch_of(64, 0), losses.ppo_clip)
    sampler, snapshot = trainer.sampler(SLOTS, CONTEXT), trainer.snapshot()
    first, compiled = drawn(sampler, snapshot), sampler.programs
    trainer.update(batch_of(64, 1), losses.ppo_clip)
    again, compiled_again = drawn(sampler, snapshot), sampler.programs - compiled
    head = [lane._params[0]["head"] for lane in sampler.lanes]
    # Made last: JAX counts the programs of one function together, whichever sampler compiled them.
    guessing = trainer.sampler(SLOTS, CONTEXT, Speculation(method="draft", tokens=2, draft=str(directory)))
    guessed, in_all = drawn(guessing, snapshot), guessing.programs
    return {
        "guessed": [guessed, drawn(guessing, snapshot)],
        "guesses_compiled_again": guessing.programs - in_all,
        "first": first,
        "again": again,
        "compiled_again": compiled_again,
        "devices": sorted({device.id for kernel in head for device in kernel.sharding.device_set}),
        "share": [kernel.addressable_shards[0].data.size / kernel.size for kernel in head],
    }


def sample_shown(directory: Path, mesh: dict[str, int]) -> list[tuple[list[int], list[float]]]:
    """What each prompt with images is answered, twice over, so that each group of devices has some of all."""
    trainer = Trainer(TrainerConfig(ModelConfig(str(directory)), mesh=MeshConfig(**mesh)))
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    asked = [request for request in requests_of(directory) for _ in range(2)]
    said = sample_to_end(sampler, [in_slot(request, slot) for slot, request in enumerate(asked)])
    return [said[slot] for slot in range(len(asked))]


if __name__ == "__main__":
    directory, file, mesh = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    found = sample_shown if "vision_config" in read_config(directory) else sample
    file.write_text(json.dumps(found(directory, mesh)))
