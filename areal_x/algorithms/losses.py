"""Losses: pure functions `(policy, batch) → (terms, metrics)` of arrays, for numpy, jax and torch.

`terms` is `[rows, length]` and exactly 0 where the mask is False; the trainer minimises `sum(batch.weights * terms)`. `metrics`
maps names to per-token arrays, which the trainer averages over the masked tokens of the whole optimizer batch.
Below: θ = policy.logp, p = batch.proximal_logp, A = batch.advantages, r = exp(θ - p).
"""

from __future__ import annotations

from collections.abc import Callable

import gin
from array_api_compat import array_namespace

from areal_x.algorithms.arrays import importance_ratio, masked
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.types import Array, Batch, Policy

LossTerms = tuple[Array, dict[str, Array]]
Loss = Callable[[Policy, Batch], LossTerms]


@gin.configurable(module="losses")
def ppo_clip(
    policy: Policy, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> LossTerms:
    """Proximal policy optimisation: the pessimistic of the plain and the clipped surrogate.

    term = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip = c, where A < 0: min(that, -A c).
    Source: arXiv 1707.06347; asymmetric clip arXiv 2503.14476; dual clip arXiv 1912.09729.
    """
    xp = array_namespace(policy.logp)
    advantages = masked(batch.advantages, batch.mask)
    ratio = importance_ratio(policy.logp, batch.proximal_logp, batch.mask)
    plain = -advantages * ratio
    clipped = -advantages * xp.clip(ratio, 1 - clip_low, 1 + clip_high)
    terms = xp.maximum(plain, clipped)
    if dual_clip is not None:
        terms = xp.where(advantages < 0, xp.minimum(terms, -advantages * dual_clip), terms)
    return masked(terms, batch.mask), {"ratio": ratio, "clip_fraction": masked(clipped > plain, batch.mask)}


@gin.configurable(module="losses")
def sft(policy: Policy, batch: Batch) -> LossTerms:
    """Supervised fine-tuning: term = -θ, the negative log-likelihood of the demonstrated token."""
    return -masked(policy.logp, batch.mask), {}


@gin.configurable(module="losses")
def kl_penalty(policy: Policy, batch: Batch, *, coefficient: float, estimator: str = "k3") -> LossTerms:
    """coefficient · kl(θ, reference). Source: GRPO, arXiv 2402.03300 (k3 in the loss)."""
    kl = ESTIMATORS[estimator](masked(policy.logp, batch.mask), masked(batch.reference_logp, batch.mask))
    return masked(coefficient * kl, batch.mask), {"reference_kl": kl}


def policy_gap(policy: Policy, batch: Batch) -> LossTerms:
    """No loss, a metric: |θ - b|, how far the policy that learns is from the one that spoke. On-policy it is the numerical
    disagreement of engine and trainer, later the effect of staleness and of earlier minibatches."""
    gap = masked(policy.logp, batch.mask) - masked(batch.behavior_logp, batch.mask)
    xp = array_namespace(gap)
    return xp.zeros_like(gap), {"policy_gap": xp.abs(gap)}


def combine(*losses: Loss) -> Loss:
    """The sum of losses whose hyperparameters are already bound. Raises ValueError when two report the same metric."""

    def combined(policy: Policy, batch: Batch) -> LossTerms:
        terms, metrics = losses[0](policy, batch)
        for loss in losses[1:]:
            more, named = loss(policy, batch)
            if twice := metrics.keys() & named.keys():
                raise ValueError(f"two of the combined losses report the metric {sorted(twice)[0]!r}: rename one")
            terms, metrics = terms + more, metrics | named
        return terms, metrics

    return combined
