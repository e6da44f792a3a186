"""Preference losses: against the formula of each pair, stable for any margin, and the same over packed rows."""

from __future__ import annotations

from functools import partial
from math import exp, log1p

import numpy as np
import pytest

from areal_x.algorithms import preferences
from areal_x.algorithms.preferences import bradley_terry, dpo, ipo
from areal_x.algorithms.weighting import pair_mean
from areal_x.types import Batch, Policy
from tests.algorithms.agreement import TOLERANCES, WAYS, agree
from tests.algorithms.frameworks import example, loss_and_gradient, value_and_gradient

LOSSES = {
    "dpo_loss": partial(preferences.dpo_loss, beta=0.5),
    "ipo_loss": partial(preferences.ipo_loss, beta=0.5),
    "reward_model_loss": preferences.reward_model_loss,
}
on_every_loss = pytest.mark.parametrize("name", LOSSES)
ELEMENTWISE = {"dpo": (dpo, 4), "ipo": (ipo, 4), "bradley_terry": (bradley_terry, 2)}
on_every_formula = pytest.mark.parametrize("name", ELEMENTWISE)


def minus_log_sigmoid(x: float) -> float:
    return log1p(exp(-x)) if x > 0 else -x + log1p(exp(x))


def halves(batch: Batch, at: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Positions of the masked tokens of the chosen and of the rejected answer of the same pair."""
    row, _ = at
    rejected = batch.segment_ids[at] + batch.segment_ids[at] % 2
    return [
        [(row, t) for t in range(batch.shape[1]) if batch.segment_ids[row, t] == segment and batch.mask[row, t]]
        for segment in (rejected - 1, rejected)
    ]


def by_hand(name: str, policy: Policy, batch: Batch, at: tuple[int, int], frozen: Policy | None = None) -> float:
    chosen, rejected = halves(batch, at)
    if not chosen or not rejected:
        return 0.0
    if name == "reward_model_loss":
        return minus_log_sigmoid(float(policy.values[chosen[-1]] - policy.values[rejected[-1]]))
    over = [sum(float(policy.logp[i] - batch.reference_logp[i]) for i in half) for half in (chosen, rejected)]
    if name == "dpo_loss":
        return minus_log_sigmoid(0.5 * (over[0] - over[1]))
    return (over[0] / len(chosen) - over[1] / len(rejected) - 1.0) ** 2


def arguments(name: str, pairs: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"x{i}": rng.normal(size=pairs) * 3 for i in range(ELEMENTWISE[name][1])}


def test_each_formula_is_that_of_its_paper():
    c, r, ref_c, ref_r = arguments("dpo").values()
    for i in range(len(c)):
        margin = (c[i] - ref_c[i]) - (r[i] - ref_r[i])
        assert dpo(c, r, ref_c, ref_r)[i] == pytest.approx(minus_log_sigmoid(0.1 * margin))
        assert dpo(c, r, ref_c, ref_r, beta=2.0)[i] == pytest.approx(minus_log_sigmoid(2 * margin))
        assert ipo(c, r, ref_c, ref_r)[i] == pytest.approx((margin - 5) ** 2)
        assert ipo(c, r, ref_c, ref_r, beta=2.0)[i] == pytest.approx((margin - 0.25) ** 2)
        assert bradley_terry(c, r)[i] == pytest.approx(minus_log_sigmoid(c[i] - r[i]))


@on_every_formula
def test_numpy_jax_and_torch_agree(name):
    function, inputs = ELEMENTWISE[name][0], arguments(name)
    slopes = {n: slope(function, inputs, n) for n in inputs}
    agree(function, *inputs.values(), torch_compiled=False)  # it is below, with its gradient
    for dtype, ways in WAYS.items():
        for framework, compiled in ways:
            if framework == "numpy":
                continue
            value, gradient = value_and_gradient(
                lambda leaves, _: function(*leaves.values()).sum(), inputs, {},
                framework=framework, dtype=dtype, compiled=compiled,
            )  # fmt: skip
            np.testing.assert_allclose(value, function(*inputs.values()).sum(), rtol=TOLERANCES[dtype])
            for n in inputs:
                np.testing.assert_allclose(gradient[n], slopes[n], rtol=10 * TOLERANCES[dtype], atol=TOLERANCES[dtype])


def slope(function, inputs, name, step=1e-6):
    up, down = ({**inputs, name: inputs[name] + sign * step} for sign in (1, -1))
    return (function(*up.values()) - function(*down.values())) / (2 * step)


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_a_margin_of_ten_thousand_has_a_finite_loss_and_the_right_gradient_in_float32(framework, margin):
    inputs = {"chosen": np.array([margin]), "rejected": np.array([0.0])}
    value, gradient = value_and_gradient(
        lambda leaves, _: bradley_terry(**{f"{n}_rewards": x for n, x in leaves.items()}).sum(),
        inputs, {}, framework=framework, dtype=np.float32,
    )  # fmt: skip
    assert value == (0 if margin > 0 else 1e4)
    assert gradient["chosen"] == (0 if margin > 0 else -1)
    assert gradient["rejected"] == (0 if margin > 0 else 1)


@on_every_loss
def test_every_masked_token_of_a_pair_has_the_pairs_loss_as_its_term(name):
    policy, batch = example(1)
    terms, metrics = LOSSES[name](policy, batch)
    for at in np.ndindex(terms.shape):
        assert terms[at] == pytest.approx(by_hand(name, policy, batch, at) if batch.mask[at] else 0.0, rel=1e-12)
    np.testing.assert_array_equal(metrics["pair_accuracy"], metrics["margin"] > 0)


@on_every_loss
def test_a_pair_without_one_of_its_halves_contributes_nothing(name):
    policy, batch = example(1)
    lonely = np.zeros(batch.shape, bool)
    for at in np.ndindex(batch.shape):
        lonely[at] = batch.mask[at] and not all(halves(batch, at))
    assert lonely.any()
    assert not lonely[batch.mask].all()
    terms, metrics = LOSSES[name](policy, batch)
    assert (terms[lonely] == 0).all()
    assert (metrics["margin"][lonely] == 0).all()
    _, gradient = loss_and_gradient(LOSSES[name], policy, batch, framework="torch")
    assert all((g[lonely] == 0).all() for g in gradient.values())


def two_pairs() -> tuple[Policy, Batch]:
    """Pairs of answers of 2 and 3, and of 4 and 1 tokens, each after a prompt of one, in two rows."""
    lengths = [(2, 3), (4, 1)]
    ids, mask = np.zeros((2, 8), np.int32), np.zeros((2, 8), bool)
    for row, (chosen, rejected) in enumerate(lengths):
        ids[row, : chosen + 1], ids[row, chosen + 1 : chosen + rejected + 2] = 1, 2
        mask[row, : chosen + rejected + 2] = True
        mask[row, [0, chosen + 1]] = False
    rng = np.random.default_rng(0)
    policy = Policy(logp=rng.normal(size=ids.shape), values=rng.normal(size=ids.shape))
    weights = pair_mean(mask, ids)
    return policy, Batch(ids, ids, ids, mask, reference_logp=rng.normal(size=ids.shape), weights=weights)


@on_every_loss
def test_weighted_by_pair_mean_the_loss_and_gradient_are_the_mean_over_pairs(name):
    policy, batch = two_pairs()
    value, gradient = loss_and_gradient(LOSSES[name], policy, batch, framework="torch")
    expected, expected_gradient = 0.0, {"logp": np.zeros((2, 8)), "values": np.zeros((2, 8))}
    for row in range(2):
        half = [np.flatnonzero((batch.segment_ids[row] == i) & batch.mask[row]) for i in (1, 2)]
        difference = (policy.logp - batch.reference_logp)[row]
        if name == "dpo_loss":  # -log σ(β (Σ chosen - Σ rejected)): ∓β σ(-margin) a token
            margin = 0.5 * (difference[half[0]].sum() - difference[half[1]].sum())
            expected += minus_log_sigmoid(margin) / 2
            slopes = [0.5 / (1 + exp(margin))] * 2
        elif name == "ipo_loss":  # (mean chosen - mean rejected - 1/(2β))²: ±2 (…) / n a token
            gap = difference[half[0]].mean() - difference[half[1]].mean() - 1
            expected += gap**2 / 2
            slopes = [-2 * gap / len(h) for h in half]
        else:
            half = [h[-1:] for h in half]
            margin = (policy.values[row, half[0]] - policy.values[row, half[1]]).item()
            expected += minus_log_sigmoid(margin) / 2
            slopes = [1 / (1 + exp(margin))] * 2
        into = expected_gradient["values" if name == "reward_model_loss" else "logp"]
        into[row, half[0]], into[row, half[1]] = -slopes[0] / 2, slopes[1] / 2
    assert value == pytest.approx(expected)
    for field in expected_gradient:
        np.testing.assert_allclose(gradient[field], expected_gradient[field], rtol=1e-12)


def test_the_margin_of_dpo_keeps_its_digits_over_ten_thousand_tokens():
    """Sums are -1e4 each, where float32 resolves 1e-3: the differences are summed instead."""
    length = 10_000
    ids = np.repeat(np.array([[1, 2]], np.int32), length, axis=1)
    logp = np.full(ids.shape, -1.0, np.float32)
    batch = Batch(ids, ids, ids, ids > 0, reference_logp=logp)
    _, metrics = preferences.dpo_loss(Policy(logp=logp + np.where(ids == 1, np.float32(2**-20), 0)), batch, beta=1.0)
    assert metrics["margin"][0, 0] == pytest.approx(length * 2**-20, rel=1e-6)
