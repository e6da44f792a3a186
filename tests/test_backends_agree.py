"""The promise behind `train.backend`: JAX and torch are the same trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.data.packing import pack
from areal_x.errors import UserError
from areal_x.trainer import ModelConfig, OptimizerConfig, Trainer, TrainerConfig, create_trainer
from areal_x.types import Batch, Trajectory

pytest.importorskip("jax")
pytest.importorskip("torch")

LOSS = partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28)


def trainer(backend: str, directory: Path) -> Trainer:
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=3, schedule="cosine", schedule_steps=20, weight_decay=0.1)
    return create_trainer(backend, TrainerConfig(model=ModelConfig(str(directory)), optimizer=optimizer, micro_batch_rows=3))


def recorded_batches(count: int, scorer: Trainer) -> list[Batch]:
    """Batches as a run would record them: unequal sequences, behaviour log-probabilities near those of the first policy."""
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
                advantages=packed.spread(rng.normal(size=10)),
                weights=sequence_mean(batch.mask, batch.segment_ids).astype(np.float32),
            )
        )
    return batches


@pytest.fixture(scope="module")
def batches(tiny_model_dir: Path) -> list[Batch]:
    return recorded_batches(20, trainer("torch", tiny_model_dir))


def largest_difference(one: Trainer, other: Trainer) -> float:
    named = dict(other.weights())
    return max(float(np.abs(x - named[name]).max()) for name, x in one.weights())


def test_twenty_updates_give_the_same_losses_and_weights(tiny_model_dir, batches):
    one, other = trainer("jax", tiny_model_dir), trainer("torch", tiny_model_dir)
    for batch in batches:
        mine, theirs = one.update(batch, LOSS), other.update(batch, LOSS)
        assert mine.keys() == theirs.keys()
        # A loss near zero is a difference of large terms: it is compared on the scale of the terms, that of the advantages.
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"])
        assert mine["ratio"] == pytest.approx(theirs["ratio"], rel=1e-4)
    assert largest_difference(one, other) < 1e-3


@pytest.mark.parametrize("first, second", [("jax", "torch"), ("torch", "jax")])
def test_a_run_begun_on_one_backend_goes_on_on_the_other(tiny_model_dir, tmp_path, batches, first, second):
    whole, begun = trainer(first, tiny_model_dir), trainer(first, tiny_model_dir)
    for batch in batches[:4]:
        whole.update(batch, LOSS)
        begun.update(batch, LOSS)
    begun.save(tmp_path / "handed")
    continued = trainer(second, tiny_model_dir)
    continued.restore(tmp_path / "handed")
    assert continued.version == 4
    for batch in batches[4:8]:
        expected, got = whole.update(batch, LOSS), continued.update(batch, LOSS)
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
    assert largest_difference(whole, continued) < 1e-4


def test_both_score_the_same_tokens_alike(tiny_model_dir, tied_model_dir, batches):
    for directory in (tiny_model_dir, tied_model_dir):
        one, other = trainer("jax", directory), trainer("torch", directory)
        np.testing.assert_allclose(one.logprobs(batches[0]), other.logprobs(batches[0]), atol=1e-5)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_images_that_are_not_looked_at_are_refused(tiny_model_dir, batches, backend):
    rows = batches[0].shape[0]
    images = {"patches": np.zeros((rows, 4, 6), np.float32), "grids": np.tile([[[1, 2, 2]]], (rows, 1, 1))}
    batch, asked = batches[0].replace(**images, image_segments=np.ones((rows, 1), np.int32)), trainer(backend, tiny_model_dir)
    for ask in (asked.logprobs, lambda batch: asked.update(batch, LOSS)):
        with pytest.raises(UserError, match="the model reads text alone"):
            ask(batch)
