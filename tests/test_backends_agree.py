"""The promise behind `train.backend`: JAX and torch are the same trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.types import Batch
from tests import backend_moves
from tests.backend_moves import LOSS, recorded_batches

pytest.importorskip("jax")
pytest.importorskip("torch")

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=3, schedule="cosine", schedule_steps=20, weight_decay=0.1)
trainer = partial(backend_moves.trainer, optimizer=OPTIMIZER)


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


def test_both_score_the_same_tokens_alike(tiny_model_dir, tied_model_dir, batches):
    for directory in (tiny_model_dir, tied_model_dir):
        one, other = trainer("jax", directory), trainer("torch", directory)
        np.testing.assert_allclose(one.logprobs(batches[0]), other.logprobs(batches[0]), atol=1e-5)
