"""Each loss term by term in plain Python, and the differences between losses."""

from __future__ import annotations

from functools import partial
from math import exp, log
from types import SimpleNamespace

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.kl import k1, k2, k3
from areal_x.types import Batch, Policy
from tests.algorithms.frameworks import bare, example, loss_and_gradient

LOSSES = {
    "reinforce": losses.reinforce,
    "ppo_clip": partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28),
    "ppo_clip_dual": partial(losses.ppo_clip, dual_clip=1.5),
    "gspo": partial(losses.gspo, clip_low=0.1, clip_high=0.2),
    "gmpo": losses.gmpo,
    "sapo": losses.sapo,
    "cispo": losses.cispo,
    "cispo_low": partial(losses.cispo, clip_low=0.3),
    "dro": partial(losses.dro, beta=0.1),
    "dppo_tv": losses.dppo_tv,
    "kpop": partial(losses.kpop, threshold=0.03),
    "value_clip": losses.value_clip,
    "entropy_bonus": partial(losses.entropy_bonus, coefficient=0.01),
    "sft": losses.sft,
    "kl_penalty": partial(losses.kl_penalty, coefficient=0.04),
    "kl_penalty_k1": partial(losses.kl_penalty, coefficient=0.04, estimator="k1"),
    "sampled_reverse_kl": losses.sampled_reverse_kl,
    "clipped_reverse_kl": partial(losses.clipped_reverse_kl, clip=0.4),
    "divergence": losses.divergence,
    "combined": losses.combine(bare(losses.ppo_clip), partial(bare(losses.kl_penalty), coefficient=0.04, estimator="k2")),
}
CLIPPED = ("ppo_clip", "ppo_clip_dual", "gspo", "gmpo", "sapo", "cispo", "cispo_low", "dppo_tv", "kpop")
on_every_loss = pytest.mark.parametrize("name", LOSSES)


def own_tokens(batch: Batch, at: tuple[int, int]) -> list[tuple[int, int]]:
    """Positions of the masked tokens of the same sequence."""
    row, _ = at
    same = (batch.segment_ids[row] == batch.segment_ids[at]) & batch.mask[row]
    return [(row, int(t)) for t in np.flatnonzero(same)]


def by_hand(name: str, policy: Policy, batch: Batch, at: tuple[int, int], frozen: Policy | None = None) -> float:
    """The term of one token. Expressions under a stop-gradient are evaluated at `frozen`, for finite differences of the
    rest."""
    frozen = frozen or policy
    now, then = (SimpleNamespace(**{n: float(x[at]) for n, x in vars(p).items()}) for p in (policy, frozen))
    p, b, ref = (float(x[at]) for x in (batch.proximal_logp, batch.behavior_logp, batch.reference_logp))
    a, target, old = (float(x[at]) for x in (batch.advantages, batch.returns, batch.old_values))
    own = own_tokens(batch, at)
    r, fixed_r = exp(now.logp - p), exp(then.logp - p)

    def clipped(ratio: float, low: float, high: float) -> float:
        return max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))

    def dual() -> float:
        return min(clipped(r, 0.2, 0.2), -1.5 * a) if a < 0 else clipped(r, 0.2, 0.2)

    def gspo() -> float:
        mean = sum(float(frozen.logp[i] - batch.proximal_logp[i]) for i in own) / len(own)
        return clipped(exp(mean) * exp(now.logp - then.logp), 0.1, 0.2)

    def gmpo() -> float:
        def c(logp: np.ndarray, i: tuple[int, int]) -> float:
            d = float(logp[i] - batch.proximal_logp[i])
            return min(d, 0.4) if batch.advantages[i] >= 0 else max(d, -0.4)

        mean = sum(c(frozen.logp, i) for i in own) / len(own)
        return -a * exp(mean) * exp(c(policy.logp, at) - c(frozen.logp, at))

    def sapo() -> float:
        tau = 1.0 if a > 0 else 1.05
        return -a / (1 + exp(-tau * (r - 1))) * 4 / tau

    def dppo() -> float:
        moved = exp(then.logp) - exp(b)
        return 0.0 if (a > 0 and moved > 0.15) or (a < 0 and moved < -0.15) else -a * exp(now.logp - b)

    def kpop() -> float:
        def divergence(p: float, q: float) -> float:
            return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))

        p, q = (min(max(exp(x), 1e-6), 1 - 1e-6) for x in (then.logp, b))
        return 0.0 if max(divergence(p, q), divergence(q, p)) > 0.03 else -a * exp(now.logp - b)

    def value() -> float:
        near = old + min(max(now.values - old, -0.2), 0.2)
        return max((now.values - target) ** 2, (near - target) ** 2) / 2

    return {
        "reinforce": lambda: -a * now.logp,
        "ppo_clip": lambda: clipped(r, 0.2, 0.28),
        "ppo_clip_dual": dual,
        "gspo": gspo,
        "gmpo": gmpo,
        "sapo": sapo,
        "cispo": lambda: -min(fixed_r, 1.28) * a * now.logp,
        "cispo_low": lambda: -max(min(fixed_r, 1.28), 0.7) * a * now.logp,
        "dro": lambda: -(a * now.logp - 0.05 * (now.logp - b) ** 2),
        "dppo_tv": dppo,
        "kpop": kpop,
        "value_clip": value,
        "entropy_bonus": lambda: -0.01 * now.entropy,
        "sft": lambda: -now.logp,
        "kl_penalty": lambda: 0.04 * (exp(ref - now.logp) - 1 - (ref - now.logp)),
        "kl_penalty_k1": lambda: 0.04 * (now.logp - ref),
        "sampled_reverse_kl": lambda: -(ref - then.logp) * now.logp,
        "clipped_reverse_kl": lambda: -min(max(ref - then.logp, -0.4), 0.4) * now.logp,
        "divergence": lambda: now.divergence,
        "combined": lambda: clipped(r, 0.2, 0.2) + 0.04 * (now.logp - ref) ** 2 / 2,
    }[name]()


def gradient_of(name: str, policy: Policy, batch: Batch) -> np.ndarray:
    return loss_and_gradient(LOSSES[name], policy, batch, framework="torch")[1]["logp"]


@on_every_loss
def test_terms_are_the_formula_token_by_token(name):
    policy, batch = example()
    terms, metrics = LOSSES[name](policy, batch)
    for at in np.ndindex(terms.shape):
        assert terms[at] == pytest.approx(by_hand(name, policy, batch, at) if batch.mask[at] else 0.0, rel=1e-12)
    for metric in metrics.values():
        assert metric.shape == terms.shape
        assert (metric[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "dppo_tv", "kpop"])
def test_the_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took(name):
    policy, batch = example(6)
    _, metrics = LOSSES[name](policy, batch)
    took = batch.mask & (gradient_of(name, policy, batch) == 0)
    assert took.any()
    np.testing.assert_array_equal(metrics["clip_fraction"] == 1, took)


def test_the_value_clip_fraction_counts_no_rounding():
    policy, batch = example(6)
    policy, batch = Policy(values=policy.values.astype(np.float32)), batch.map(lambda x: x.astype(np.float32))
    batch = batch.replace(mask=batch.mask > 0)
    _, metrics = losses.value_clip(policy, batch)
    _, gradient = loss_and_gradient(losses.value_clip, policy, batch, framework="torch", dtype=np.float32)
    took = batch.mask & (gradient["values"] == 0)
    assert took.any()
    np.testing.assert_array_equal(metrics["value_clip_fraction"] == 1, took)


def test_cispo_bounds_the_weight_of_a_token_but_keeps_its_gradient():
    policy, batch = example(6)
    _, metrics = LOSSES["cispo"](policy, batch)
    bounded = metrics["clip_fraction"] == 1
    np.testing.assert_array_equal(bounded, batch.mask & (metrics["ratio"] > 1.28))
    expected = -1.28 * (batch.advantages * batch.weights)[bounded]
    np.testing.assert_allclose(gradient_of("cispo", policy, batch)[bounded], expected)


def test_gspo_gives_every_token_of_a_sequence_the_same_ratio():
    policy, batch = example(3)
    _, metrics = LOSSES["gspo"](policy, batch)
    for at in zip(*np.nonzero(batch.mask), strict=True):
        own = own_tokens(batch, at)
        mean = np.mean([policy.logp[i] - batch.proximal_logp[i] for i in own])
        assert [metrics["ratio"][i] for i in own] == pytest.approx([exp(mean)] * len(own))


def test_kpop_allows_a_rare_token_ten_times_its_probability_and_a_sure_one_little():
    p = np.array([[1e-3, 0.99, 0.5, 0.5]])
    q = np.array([[1e-2, 0.80, 0.5, 0.05]])
    mask, ones = np.ones((1, 4), bool), np.ones((1, 4))
    batch = Batch(ones, ones, ones, mask, behavior_logp=np.log(q), advantages=ones)
    for policy, b in ((np.log(p), batch), (np.log(q), batch.replace(behavior_logp=np.log(p)))):  # in both directions
        terms, metrics = losses.kpop(Policy(logp=policy), b)
        assert metrics["clip_fraction"].tolist() == [[0, 1, 0, 1]]
        assert terms[0, 0] == pytest.approx(-np.exp(policy - b.behavior_logp)[0, 0])


def test_dppo_leaves_a_token_out_by_its_probability_and_not_by_its_ratio():
    rare, frequent = -9.0, -0.7  # the rare one's ratio of 7 moves its probability by 8e-4, the other's of 1.5 by 0.25
    policy = Policy(logp=np.array([[rare + 2.0, frequent + 0.4]]))
    ids = np.ones((1, 2), np.int32)
    behavior = np.array([[rare, frequent]])
    batch = Batch(tokens=ids, segment_ids=ids, positions=ids, mask=ids > 0, behavior_logp=behavior, advantages=ids * 1.0)
    _, metrics = losses.dppo_tv(policy, batch)
    assert metrics["clip_fraction"].tolist() == [[0, 1]]


def test_the_losses_that_are_meant_to_be_combined_share_no_metric():
    policy, batch = example()
    parts = (
        losses.ppo_clip, losses.policy_gap, LOSSES["kl_penalty"], losses.value_clip, LOSSES["entropy_bonus"],
        losses.sampled_reverse_kl,
    )  # fmt: skip
    terms, metrics = losses.combine(*parts)(policy, batch)
    np.testing.assert_allclose(terms, sum(part(policy, batch)[0] for part in parts))
    assert metrics.keys() == set().union(*(part(policy, batch)[1] for part in parts))


def test_a_metric_named_twice_is_an_error():
    with pytest.raises(ValueError, match=r"'(ratio|clip_fraction)'"):
        losses.combine(losses.ppo_clip, losses.gspo)(*example())


def test_k3_keeps_its_digits_near_the_reference_in_float32():
    d = np.float32(2**-10)
    assert k3(d, np.zeros_like(d)) == pytest.approx(exp(-d) - 1 + float(d), rel=1e-3)


def test_the_estimators_of_the_kl_divergence_have_its_mean():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    logp, ref = np.log(p), np.log(q)
    exact = (p * (logp - ref)).sum()
    assert (p * k1(logp, ref)).sum() == pytest.approx(exact)
    assert (p * k3(logp, ref)).sum() == pytest.approx(exact)
    np.testing.assert_allclose(k2(logp, ref), (logp - ref) ** 2 / 2)


def make(seed: int = 0) -> tuple[np.ndarray, Batch]:
    policy, batch = example(seed)
    return policy.logp, batch
