"""Every loss: against a loop in plain numpy, equal on three frameworks, blind to what stands behind the mask."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.kl import k1, k2, k3
from areal_x.types import Batch, Policy

LOSSES = {
    "ppo_clip": partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28),
    "ppo_clip_dual": partial(losses.ppo_clip, dual_clip=3.0),
    "sft": losses.sft,
    "kl_penalty": partial(losses.kl_penalty, coefficient=0.04),
    "combined": losses.combine(losses.ppo_clip, partial(losses.kl_penalty, coefficient=0.04, estimator="k2")),
}
on_every_loss = pytest.mark.parametrize("name", LOSSES)


def make(seed: int = 0, dtype: type = np.float64, garbage: float | None = None) -> tuple[np.ndarray, Batch]:
    rng = np.random.default_rng(seed)
    shape = (3, 11)
    ids = np.sort(rng.integers(0, 4, shape), axis=1)[:, ::-1].astype(np.int32).copy()
    mask = (rng.random(shape) < 0.7) & (ids > 0)
    draw = lambda scale=1.0: (rng.normal(size=shape) * scale).astype(dtype)  # noqa: E731
    behavior = -np.abs(draw())
    theta, reference, advantages, weights = behavior + draw(0.4), behavior + draw(0.3), draw(), np.abs(draw())
    if garbage is not None:
        for array in (theta, behavior, reference, advantages):
            array[~mask] = garbage
    batch = Batch(
        tokens=ids, segment_ids=ids, positions=ids, mask=mask, behavior_logp=behavior, proximal_logp=behavior,
        reference_logp=reference, advantages=advantages, weights=np.where(mask, weights, 0),
    )  # fmt: skip
    return theta, batch


def by_hand(name: str, theta: float, batch: Batch, at: tuple[int, int]) -> float:
    p, a, ref = batch.proximal_logp[at], batch.advantages[at], batch.reference_logp[at]
    r = float(np.exp(theta - p))

    def clipped(low: float, high: float) -> float:
        return max(-a * r, -a * min(max(r, 1 - low), 1 + high))

    dual = clipped(0.2, 0.2)
    return {
        "ppo_clip": clipped(0.2, 0.28),
        "ppo_clip_dual": min(dual, -3 * a) if a < 0 else dual,
        "sft": -theta,
        "kl_penalty": 0.04 * (float(np.exp(ref - theta)) - 1 - (ref - theta)),
        "combined": clipped(0.2, 0.2) + 0.04 * (theta - ref) ** 2 / 2,
    }[name]


def total(loss, theta, batch):
    return (loss(Policy(logp=theta), batch)[0] * batch.weights).sum()


def jax_value_and_gradient(loss, theta, batch, jit=False):
    import jax

    with jax.enable_x64():
        function = jax.value_and_grad(lambda t, b: total(loss, t, b))
        from areal_x_jax.trainer import Trainer  # noqa: F401 - importing it makes Batch a pytree

        value, gradient = (jax.jit(function) if jit else function)(jax.numpy.asarray(theta), batch.map(jax.numpy.asarray))
        return np.asarray(value), np.asarray(gradient)


def torch_value_and_gradient(loss, theta, batch):
    import torch

    leaf = torch.tensor(theta, requires_grad=True)
    value = total(loss, leaf, batch.map(torch.tensor))
    value.backward()
    return value.detach().numpy(), leaf.grad.numpy()


@on_every_loss
def test_terms_are_the_formula_token_by_token(name):
    theta, batch = make()
    terms, _ = LOSSES[name](Policy(logp=theta), batch)
    for at in np.ndindex(theta.shape):
        expected = by_hand(name, theta[at], batch, at) if batch.mask[at] else 0.0
        assert terms[at] == pytest.approx(expected, rel=1e-12)


@on_every_loss
def test_the_gradient_is_that_of_finite_differences(name):
    theta, batch = make(1)
    _, gradient = torch_value_and_gradient(LOSSES[name], theta, batch)
    for at in np.ndindex(theta.shape):
        step = np.zeros_like(theta)
        step[at] = 1e-6
        slope = (total(LOSSES[name], theta + step, batch) - total(LOSSES[name], theta - step, batch)) / 2e-6
        assert gradient[at] == pytest.approx(slope, rel=1e-5, abs=1e-8)


@on_every_loss
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-6), (np.float32, 1e-5)])
def test_numpy_jax_and_torch_agree(name, dtype, tolerance):
    theta, batch = make(2, dtype)
    value = total(LOSSES[name], theta, batch)
    results = [
        jax_value_and_gradient(LOSSES[name], theta, batch),
        jax_value_and_gradient(LOSSES[name], theta, batch, jit=True),
        torch_value_and_gradient(LOSSES[name], theta, batch),
    ]
    for other, gradient in results:
        np.testing.assert_allclose(other, value, rtol=tolerance)
        np.testing.assert_allclose(gradient, results[0][1], rtol=tolerance, atol=tolerance * 1e-2)


@on_every_loss
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_garbage_behind_the_mask_changes_neither_value_nor_gradient(name, garbage):
    clean, dirty = make(3), make(3, garbage=garbage)
    for compute in (jax_value_and_gradient, torch_value_and_gradient):
        value, gradient = compute(LOSSES[name], *dirty)
        expected, expected_gradient = compute(LOSSES[name], *clean)
        assert value == expected
        np.testing.assert_array_equal(gradient, expected_gradient)
        assert (gradient[~dirty[1].mask] == 0).all()


@on_every_loss
def test_log_ratios_of_two_hundred_stay_finite(name):
    theta, batch = make(4)
    for shift in (200.0, -200.0):
        value, gradient = torch_value_and_gradient(LOSSES[name], theta + shift, batch)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


def test_on_policy_the_clipped_loss_has_the_gradient_of_reinforce():
    theta, batch = make(5)
    batch = batch.replace(proximal_logp=theta)
    _, gradient = torch_value_and_gradient(LOSSES["ppo_clip"], theta, batch)
    np.testing.assert_allclose(gradient, np.where(batch.mask, -batch.advantages * batch.weights, 0), rtol=1e-12)


def test_the_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took():
    theta, batch = make(6)
    _, metrics = LOSSES["ppo_clip"](Policy(logp=theta), batch)
    _, gradient = torch_value_and_gradient(LOSSES["ppo_clip"], theta, batch)
    np.testing.assert_array_equal(metrics["clip_fraction"] == 1, batch.mask & (gradient == 0))


def test_a_metric_named_twice_is_an_error():
    theta, batch = make()
    with pytest.raises(ValueError, match=r"'(ratio|clip_fraction)'"):
        losses.combine(losses.ppo_clip, losses.ppo_clip)(Policy(logp=theta), batch)


def test_the_estimators_of_the_kl_divergence_have_its_mean():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    logp, ref = np.log(p), np.log(q)
    exact = (p * (logp - ref)).sum()
    assert (p * k1(logp, ref)).sum() == pytest.approx(exact)
    assert (p * k3(logp, ref)).sum() == pytest.approx(exact)
    np.testing.assert_allclose(k2(logp, ref), (logp - ref) ** 2 / 2)
