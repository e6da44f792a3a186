"""Log-probabilities and values against a forward pass in numpy, whatever the packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.testing.conformance.helpers import (
    TOLERANCE,
    each,
    make_trainer,
    packed_batch,
    policy_gradient,
    squared_error,
)
from areal_x.testing.reference import Reference


def test_logprobs_are_those_of_each_sequence_alone(still: Trainer, model_dir: Path) -> None:
    batch, packed = packed_batch()
    found = still.logprobs(batch)
    assert found.dtype == np.float32
    assert found.shape == batch.shape
    assert not found[batch.segment_ids == 0].any()
    for trajectory, logp in each(packed, found):
        expected = Reference(model_dir).logprobs(trajectory.tokens)
        np.testing.assert_allclose(logp, expected, atol=TOLERANCE)
        assert logp[0] == 0


@pytest.mark.parametrize("head_chunk", [0, 8])
def test_logprobs_with_a_tied_head_and_a_temperature(
    head_chunk: int, backend: str, other_dir: Path
) -> None:
    batch, packed = packed_batch()
    trainer = make_trainer(backend, other_dir, temperature=0.7, head_chunk=head_chunk)
    for trajectory, logp in each(packed, trainer.logprobs(batch)):
        expected = Reference(other_dir).logprobs(trajectory.tokens, temperature=0.7)
        np.testing.assert_allclose(logp, expected, atol=TOLERANCE)


def test_row_length_order_and_padding_do_not_change_logprobs(still: Trainer) -> None:
    batch, packed = packed_batch()
    expected = packed.gather(still.logprobs(batch))
    order = np.random.default_rng(3).permutation(len(expected)).tolist()
    other, repacked = packed_batch(row_length=64, rows_multiple=4, order=order)
    found = repacked.gather(still.logprobs(other))
    for i, logp in zip(order, found, strict=True):
        np.testing.assert_allclose(logp, expected[i], atol=1e-5)


def test_tokens_outside_the_vocabulary_are_refused(still: Trainer) -> None:
    batch, _ = packed_batch()
    with pytest.raises(UserError, match="token 44 is outside the vocabulary of 44"):
        still.logprobs(batch.replace(tokens=np.full_like(batch.tokens, 44)))


def test_images_for_a_model_of_text_are_refused(still: Trainer) -> None:
    batch, _ = packed_batch()
    rows = batch.shape[0]
    with_images = batch.replace(
        patches=np.zeros((rows, 4, 6), np.float32),
        grids=np.tile([[[1, 2, 2]]], (rows, 1, 1)),
        image_segments=np.ones((rows, 1), np.int32),
    )
    with pytest.raises(UserError, match="the model reads text only"):
        still.logprobs(with_images)
    with pytest.raises(UserError, match="the model reads text only"):
        still.update(with_images, policy_gradient)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_model_gives_what_the_same_model_gives_in_training(
    precision: str, backend: str, model_dir: Path
) -> None:
    batch, _ = packed_batch()
    trained, frozen = (
        make_trainer(backend, model_dir, precision=precision, frozen=frozen)
        for frozen in (False, True)
    )
    assert np.abs(frozen.logprobs(batch)).max() > 0.1
    np.testing.assert_allclose(frozen.logprobs(batch), trained.logprobs(batch), atol=1e-6)


def test_bf16_is_near_fp32_and_weights_are_published_in_it(
    backend: str, model_dir: Path, still: Trainer
) -> None:
    batch, _ = packed_batch()
    rough = make_trainer(backend, model_dir, precision="bf16")
    gap = np.abs(rough.logprobs(batch) - still.logprobs(batch)).max()
    assert 1e-5 < gap < 0.3
    assert {x.dtype.name for _, x in rough.weights()} == {"bfloat16"}
    assert {x.dtype.name for _, x in still.weights()} == {"float32"}


def test_a_frozen_model_refuses_to_learn_and_to_save(
    backend: str, model_dir: Path, tmp_path: Path
) -> None:
    frozen = make_trainer(backend, model_dir, frozen=True)
    with pytest.raises(ValueError, match="a frozen model has no update"):
        frozen.update(packed_batch()[0], policy_gradient)
    with pytest.raises(ValueError, match="a frozen model has no state to save"):
        frozen.save(tmp_path / "x")


def test_a_frozen_scorer_keeps_its_score_in_fp32(
    backend: str, scorer_dir: Path, tmp_path: Path
) -> None:
    batch, _ = packed_batch()
    trained = make_trainer(backend, scorer_dir, head="reward")
    frozen = make_trainer(backend, scorer_dir, head="reward", frozen=True)
    np.testing.assert_allclose(frozen.values(batch), trained.values(batch), rtol=1e-5, atol=1e-6)
    rough = make_trainer(backend, scorer_dir, head="reward", frozen=True, precision="bf16")
    assert dict(rough.weights()).keys() == dict(trained.weights()).keys()


@pytest.mark.parametrize("head", ["value", "reward"])
def test_values_are_scores_before_or_after_each_token(
    head: str, backend: str, scorer_dir: Path
) -> None:
    batch, packed = packed_batch()
    trainer = make_trainer(backend, scorer_dir, head=head)
    found = trainer.values(batch)
    assert found.dtype == np.float32
    assert not found[batch.segment_ids == 0].any()
    for trajectory, values in each(packed, found):
        scores = Reference(scorer_dir).scores(trajectory.tokens)
        expected = scores if head == "reward" else [0, *scores[:-1]]
        np.testing.assert_allclose(values, expected, atol=TOLERANCE)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_causal_model_starts_as_a_scorer_of_zeros(
    head: str, backend: str, model_dir: Path, still: Trainer
) -> None:
    trainer = make_trainer(backend, model_dir, head=head)
    assert not trainer.values(packed_batch()[0]).any()
    tensors, policy = dict(trainer.weights()), dict(still.weights())
    np.testing.assert_array_equal(tensors.pop("score.weight"), np.zeros((1, 64), np.float32))
    assert tensors.keys() == policy.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("head", ["value", "reward"])
def test_what_a_head_does_not_compute_is_refused(
    head: str, backend: str, scorer_dir: Path, still: Trainer
) -> None:
    batch, _ = packed_batch()
    scorer = make_trainer(backend, scorer_dir, head=head)
    calls: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: scorer.logprobs(batch),
        "snapshot": scorer.snapshot,
        "sampler": lambda: scorer.sampler(2, 32),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} needs a trainer with the head 'policy'"):
            call()
    wanted = "values needs a trainer with the head 'value' or 'reward', not 'policy'"
    with pytest.raises(ValueError, match=wanted):
        still.values(batch)


def test_a_scorer_learns(backend: str, model_dir: Path) -> None:
    batch, _ = packed_batch()
    batch = batch.replace(returns=batch.mask.astype(np.float32))
    optimizer = OptimizerConfig(learning_rate=1e-2)
    trainer = make_trainer(backend, model_dir, head="value", optimizer=optimizer)
    learned = [trainer.update(batch, squared_error)["loss"] for _ in range(8)]
    assert learned[-1] < 0.7 * learned[0]
