"""A model that is only asked: it says what the same model in training says, and keeps nothing that training needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.batching.packing import pack
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.types import Batch, Trajectory


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    nothing = np.zeros(6, np.float32)
    made = [Trajectory.from_completion(rng.integers(2, 40, 3), rng.integers(2, 40, 6), nothing, nothing) for _ in range(5)]
    packed = pack(made, 24).batch
    return packed.replace(weights=packed.mask.astype(np.float32))


def make(backend: str, directory: Path, **changes: object) -> Trainer:
    config = TrainerConfig(model=ModelConfig(str(directory)), micro_batch_rows=2)
    return create_trainer(backend, dataclasses.replace(config, **changes))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_says_what_the_same_model_in_training_says(backend, precision, batch, tiny_model_dir):
    learning, frozen = (make(backend, tiny_model_dir, precision=precision, frozen=f) for f in (False, True))
    assert np.abs(frozen.logprobs(batch)).max() > 0.1
    np.testing.assert_allclose(frozen.logprobs(batch), learning.logprobs(batch), atol=1e-6)


def test_a_judge_keeps_its_score_in_fp32(backend, batch, tiny_model_dir, tmp_path):
    judge = make(backend, tiny_model_dir, head="reward")
    judge.update(batch.replace(returns=batch.weights, old_values=batch.weights), losses.value_clip)
    judge.save(tmp_path / "judge")
    frozen = make(backend, tmp_path / "judge", head="reward", frozen=True)
    np.testing.assert_allclose(frozen.values(batch), judge.values(batch), rtol=1e-5)
    in_bf16 = dict(make(backend, tmp_path / "judge", head="reward", frozen=True, precision="bf16").weights())
    assert in_bf16.keys() == dict(judge.weights()).keys()


def test_it_learns_and_saves_nothing(backend, batch, tiny_model_dir, tmp_path):
    frozen = make(backend, tiny_model_dir, frozen=True)
    with pytest.raises(ValueError, match="a frozen model has no update"):
        frozen.update(batch, losses.sft)
    with pytest.raises(ValueError, match="a frozen model has no state to save"):
        frozen.save(tmp_path / "x")
    assert getattr(frozen, "moments", None) is None
    assert not hasattr(frozen, "optimizer") or backend == "jax"
