"""One optimizer step: its loss, gradient, metrics and effect, from formulas and finite
differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.hf import model_dir as files
from areal_x.protocols.trainer import KeepsEntropies, Trainer
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.testing.conformance.helpers import (
    LENGTHS,
    STILL,
    TOLERANCE,
    assert_equal_weights,
    each,
    make_trainer,
    packed_batch,
    policy_gradient,
    weights_of,
)
from areal_x.testing.reference import Reference
from areal_x.types import Batch, Policy

# With an eps far above every gradient, AdamW's first step is the gradient itself.
RAW = OptimizerConfig(learning_rate=1e5, eps=1e5, weight_decay=0.0, clip_norm=0.0)


def expected_loss(directory: Path, tensors: dict[str, np.ndarray] | None = None) -> float:
    """Returns sum(weights * terms) of `policy_gradient`, by the reference."""
    batch, packed = packed_batch()
    reference, total = Reference(directory, tensors), 0.0
    own = (packed.gather(x) for x in (batch.advantages, batch.weights, batch.mask))
    for (trajectory, _), advantage, weight, mask in zip(
        each(packed, batch.advantages), *own, strict=True
    ):
        terms = -advantage * reference.logprobs(trajectory.tokens)
        total += float((weight * terms)[mask].sum())
    return total


def test_the_loss_is_the_weighted_sum_of_the_terms(still: Trainer, model_dir: Path) -> None:
    batch, _ = packed_batch()
    version = still.version
    result = still.update(batch, policy_gradient)
    assert still.version == version + 1
    metrics = {"one", "garbage", "largest_token"}
    assert result.keys() == {"loss", "grad_norm", "learning_rate", "skipped"} | metrics
    assert result["loss"] == pytest.approx(expected_loss(model_dir), rel=1e-4, abs=1e-5)
    assert result["skipped"] == 0


def test_loss_and_gradient_are_linear_in_the_weights(still: Trainer) -> None:
    batch, _ = packed_batch()
    one = still.update(batch, policy_gradient)
    three = still.update(batch.replace(weights=3 * batch.weights), policy_gradient)
    for name in ("loss", "grad_norm"):
        assert three[name] == pytest.approx(3 * one[name], rel=1e-4)


def test_the_gradient_is_that_of_finite_differences(backend: str, model_dir: Path) -> None:
    batch, _ = packed_batch()
    trainer = make_trainer(backend, model_dir, optimizer=RAW)
    before = weights_of(trainer)
    result = trainer.update(batch, policy_gradient)
    gradient = {name: before[name] - x for name, x in weights_of(trainer).items()}
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
    assert norm == pytest.approx(result["grad_norm"], rel=1e-3)
    tensors = dict(files.read_tensors(model_dir))
    assert gradient.keys() == tensors.keys()
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = {name: rng.normal(size=x.shape) for name, x in tensors.items()}
        step, moved = 1e-6, []
        for sign in (1, -1):
            shifted = {name: x + sign * step * direction[name] for name, x in tensors.items()}
            moved.append(expected_loss(model_dir, shifted))
        slope = (moved[0] - moved[1]) / (2 * step)
        found = sum(float((g * direction[name]).sum()) for name, g in gradient.items())
        assert found == pytest.approx(slope, rel=1e-3, abs=2e-3 * norm)


def test_clipping_scales_the_step_and_reports_the_norm_before_it(
    backend: str, model_dir: Path
) -> None:
    batch, _ = packed_batch()
    free = make_trainer(backend, model_dir, optimizer=RAW)
    before = weights_of(free)
    norm = free.update(batch, policy_gradient)["grad_norm"]
    clipped = make_trainer(backend, model_dir, optimizer=replace(RAW, clip_norm=norm / 4))
    assert clipped.update(batch, policy_gradient)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    whole, quarter = weights_of(free), weights_of(clipped)
    for name, x in before.items():
        np.testing.assert_allclose(quarter[name] - x, (whole[name] - x) / 4, atol=1e-4 * norm)


def test_the_learning_rate_follows_the_schedule(backend: str, model_dir: Path) -> None:
    optimizer = OptimizerConfig(
        learning_rate=1e-3, warmup_steps=2, schedule="cosine", schedule_steps=4
    )
    trainer, (batch, _) = make_trainer(backend, model_dir, optimizer=optimizer), packed_batch()
    for step in range(4):
        rate = float(optimizer.learning_rate_at(np.float32(step)))
        found = trainer.update(batch, policy_gradient)["learning_rate"]
        assert found == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize("head", ["policy", "value"])
def test_without_a_gradient_a_step_is_the_decay_of_matrices(
    head: str, backend: str, model_dir: Path, scorer_dir: Path
) -> None:
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    directory = model_dir if head == "policy" else scorer_dir
    trainer = make_trainer(backend, directory, optimizer=optimizer, head=head)
    batch, _ = packed_batch()

    def nothing(policy: Policy, batch: Batch) -> Any:
        return 0 * (policy.logp if policy.values is None else policy.values), {}

    before = weights_of(trainer)
    trainer.update(batch, nothing)
    for name, x in weights_of(trainer).items():
        kept = 1 - 0.1 * 0.5 if x.ndim == 2 else 1
        np.testing.assert_allclose(x, kept * before[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("rows_at_once", "row_length", "multiple"), [(1, 32, 1), (3, 32, 8), (8, 64, 8)]
)
def test_packing_order_padding_and_micro_batches_do_not_change_a_step(
    rows_at_once: int,
    row_length: int,
    multiple: int,
    backend: str,
    still: Trainer,
    model_dir: Path,
) -> None:
    expected = still.update(packed_batch()[0], policy_gradient)
    order = np.random.default_rng(rows_at_once).permutation(len(LENGTHS)).tolist()
    batch, _ = packed_batch(row_length, multiple, order)
    trainer = make_trainer(backend, model_dir, optimizer=STILL, micro_batch_rows=rows_at_once)
    found = trainer.update(batch, policy_gradient)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name] == pytest.approx(x, rel=2e-5, abs=1e-6), name


def test_garbage_behind_the_mask_does_not_matter(still: Trainer) -> None:
    batch, _ = packed_batch()
    expected = still.update(batch, policy_gradient)
    garbage = np.where(batch.mask, 0, np.nan).astype(np.float32)
    spoilt = batch.replace(
        advantages=batch.advantages + garbage, behavior_logp=batch.behavior_logp + garbage
    )
    found = still.update(spoilt, policy_gradient)
    assert found["loss"] == expected["loss"]
    assert found["grad_norm"] == expected["grad_norm"]


def test_metrics_are_reduced_over_the_masked_tokens_of_the_whole_batch(still: Trainer) -> None:
    batch, _ = packed_batch()
    result = still.update(batch, policy_gradient)
    assert result["one"] == pytest.approx(1.0)
    assert result["garbage"] == pytest.approx(batch.advantages[batch.mask].mean(), rel=1e-5)
    assert result["largest_token"] == batch.tokens[batch.mask].max()


def test_a_batch_without_weights_is_an_error(still: Trainer) -> None:
    batch, _ = packed_batch()
    with pytest.raises(ValueError, match="no weights"):
        still.update(batch.replace(weights=None), policy_gradient)


def test_a_loss_that_raises_leaves_no_trace(backend: str, model_dir: Path) -> None:
    batch, _ = packed_batch()
    calls: list[int] = []

    def fails_late(policy: Policy, batch: Batch) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return policy_gradient(policy, batch)

    def fails(policy: Policy, batch: Batch) -> Any:
        raise ZeroDivisionError

    trainer, untouched = (make_trainer(backend, model_dir, micro_batch_rows=1) for _ in range(2))
    with pytest.raises(ZeroDivisionError):
        trainer.update(batch, fails)
    try:
        trainer.update(batch, fails_late)  # a backend may trace a loss once only
        assert trainer.version == 1
        untouched.update(batch, policy_gradient)
    except ZeroDivisionError:
        assert trainer.version == 0
    assert trainer.update(batch, policy_gradient) == untouched.update(batch, policy_gradient)
    assert_equal_weights(trainer, untouched)


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    backend: str, model_dir: Path, tmp_path: Path
) -> None:
    batch, _ = packed_batch()
    poison = np.where(
        np.arange(batch.mask.size).reshape(batch.shape) == np.flatnonzero(batch.mask)[0], np.nan, 0
    )
    bad = batch.replace(advantages=(batch.advantages + poison).astype(np.float32))
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=4)
    trainer, other = (make_trainer(backend, model_dir, optimizer=optimizer) for _ in range(2))
    assert trainer.update(batch, policy_gradient)["skipped"] == 0
    before = weights_of(trainer)
    result = trainer.update(bad, policy_gradient)
    assert result["skipped"] == 1
    assert not np.isfinite(result["loss"])
    assert trainer.version == 2
    for name, x in weights_of(trainer).items():
        np.testing.assert_array_equal(x, before[name])
    trainer.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    assert trainer.update(batch, policy_gradient) == other.update(batch, policy_gradient)
    assert_equal_weights(trainer, other)


def test_the_entropy_is_that_of_the_whole_distribution(backend: str, model_dir: Path) -> None:
    batch, packed = packed_batch()
    trainer = make_trainer(backend, model_dir, optimizer=STILL, entropy=True, temperature=0.8)

    def entropy(policy: Policy, batch: Batch) -> Any:
        return policy.entropy, {"entropy": policy.entropy}

    total, values, by_token = 0.0, [], []
    own = (packed.gather(x) for x in (batch.weights, batch.mask))
    for (trajectory, _), weight, mask in zip(each(packed, batch.weights), *own, strict=True):
        logp = Reference(model_dir).distributions(trajectory.tokens, 0.8)
        expected = np.array([0, *-(np.exp(logp) * logp).sum(-1)[:-1]])
        total += float((weight * expected)[mask].sum())
        values += expected[mask].tolist()
        by_token.append(np.where(mask, expected, 0))
    result = trainer.update(batch, entropy)
    if isinstance(trainer, KeepsEntropies):
        kept = trainer.step_entropies()
        assert kept is not None
        for found, wanted in zip(packed.gather(kept), by_token, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert result["loss"] == pytest.approx(total, rel=TOLERANCE)
    assert result["entropy"] == pytest.approx(np.mean(values), rel=TOLERANCE)


def test_a_loss_gets_no_entropy_unless_it_is_requested(still: Trainer) -> None:
    seen: list[Any] = []

    def watch(policy: Policy, batch: Batch) -> Any:
        seen.append(policy.entropy)
        return policy_gradient(policy, batch)

    still.update(packed_batch()[0], watch)
    assert seen
    assert all(x is None for x in seen)
