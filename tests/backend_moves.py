"""Training on recorded batches, on one backend or moved between backends: for tests, and for a benchmark that prints it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import pack
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Trajectory

LOSS = partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28)


class Course(NamedTuple):
    """Result of a training: the loss of each update, and the final weights."""

    losses: np.ndarray
    weights: dict[str, np.ndarray]


def trainer(backend: str, directory: Path, optimizer: OptimizerConfig, **changes: Any) -> Trainer:
    model = ModelConfig(str(directory))
    config = TrainerConfig(model=model, optimizer=optimizer, micro_batch_rows=3, precision="fp32", **changes)
    return create_trainer(backend, config)


def recorded_batches(count: int, scorer: Trainer, mean: float = 0.0) -> list[Batch]:
    """Batches as a run would record them: sequences of different lengths, behaviour log-probabilities near the first policy's.

    mean: of the advantages. At 0 a loss is a small difference of large terms, whose relative error means little."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        trajectories = []
        for _ in range(10):
            prompt, answer = rng.integers(2, 40, rng.integers(1, 9)), rng.integers(2, 40, rng.integers(1, 22))
            trajectories.append(Trajectory.from_completion(prompt, answer, np.zeros(len(answer)), np.zeros(len(answer))))
        packed = pack(trajectories, 32)
        batch = packed.batch
        behavior = np.where(batch.mask, scorer.logprobs(batch) + rng.normal(0, 0.1, batch.shape), 0).astype(np.float32)
        batches.append(
            batch.replace(
                behavior_logp=behavior,
                proximal_logp=behavior,
                advantages=packed.spread(rng.normal(mean, size=10)),
                weights=sequence_mean(batch.mask, batch.segment_ids).astype(np.float32),
            )
        )
    return batches


def across(count: int) -> OptimizerConfig:
    """AdamW with a warm-up over a quarter of the updates and a cosine decay over the rest, so that a lost step count shows."""
    schedule = {"warmup_steps": count // 4, "schedule": "cosine", "schedule_steps": count}
    return OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, **schedule)


def learn(backends: Sequence[str], directory: Path, batches: Sequence[Batch], **settings: Any) -> Course:
    """One update per batch; each backend in turn takes an equal share, from the checkpoint of the one before."""
    losses_so_far: list[float] = []
    parts = np.array_split(np.arange(len(batches)), len(backends))
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name)
        for backend, part in zip(backends, parts, strict=True):
            learner = trainer(backend, directory, **settings)
            if losses_so_far:
                learner.restore(checkpoint)
            assert learner.version == len(losses_so_far)
            losses_so_far += [learner.update(batches[i], LOSS)["loss"] for i in part]
            learner.save(checkpoint)
    return Course(np.array(losses_so_far), {name: np.array(x, np.float32) for name, x in learner.weights()})


def deviations(found: Course, expected: Course) -> tuple[float, float, float]:
    """The largest relative deviation of a loss, the largest difference of a weight, and the norm of the weights' difference
    relative to their norm."""
    loss = np.abs(found.losses / expected.losses - 1).max()
    one, other = (
        np.concatenate([course.weights[name].reshape(-1) for name in expected.weights]) for course in (found, expected)
    )
    return float(loss), float(np.abs(one - other).max()), float(np.linalg.norm(one - other) / np.linalg.norm(other))
