"""Losses: pure functions `(policy, batch) → (terms, metrics)` of numpy, jax or torch arrays.

`terms` is `[rows, length]` and exactly 0 where the mask is False; the trainer minimises
`sum(batch.weights * terms)`. `metrics` maps names to per-token arrays, which the trainer averages
over the masked tokens of the whole optimizer batch (or takes the maximum of, if the name begins
with largest_).

Notation: logp = policy.logp, proximal = batch.proximal_logp, behavior = batch.behavior_logp, A =
batch.advantages, V = policy.values, R = batch.returns, r = exp(logp - proximal) with the log-ratio
clamped to ±20, sg = stop-gradient.

Every loss masks its inputs before any arithmetic: 0 · NaN is NaN, also in a gradient. In gin, a
loss that shares its name with a recipe is called NAME_loss. An invalid hyperparameter raises a
ConfigError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import gin
from array_api_compat import array_namespace

from areal_x.algorithms.arrays import (
    clamp,
    importance_ratio,
    masked,
    segment_mean,
    sigmoid,
    stop_gradient,
)
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.errors import ConfigError, at_least, one_of, positive
from areal_x.types import NOT_THE_POLICY, Array, Batch, Loss, LossTerms, Policy, evaluate_loss

SURE = 1e-6  # least probability, of a token and of all others, in a binary divergence


@gin.configurable(module="losses")
def reinforce(policy: Policy, batch: Batch) -> LossTerms:
    """The policy gradient: term = -A logp. Source: Williams 1992; for language models RLOO, arXiv
    2402.14740."""
    return -masked(batch.advantages, batch.mask) * masked(policy.logp, batch.mask), {}


@gin.configurable(module="losses")
def ppo_clip(
    policy: Policy,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossTerms:
    """Proximal policy optimisation: the more pessimistic of the plain and the clipped surrogate.

    term = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip = c, where A < 0:
    min(that, -A c). Source: arXiv 1707.06347; asymmetric clip arXiv 2503.14476; dual clip arXiv
    1912.09729.

    Args:
        clip_low: The ratio is clipped at 1 - clip_low; at least 0.
        clip_high: The ratio is clipped at 1 + clip_high; at least 0.
        dual_clip: Largest ratio that counts where the advantage is negative, above 1; None for no
            bound.
    """
    _require_at_least_zero("ppo_clip", clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(
            "ppo_clip.dual_clip", dual_clip, "greater than 1, as it bounds ratios that exceed 1"
        )
    xp = array_namespace(policy.logp)
    ratio = importance_ratio(policy.logp, batch.proximal_logp, batch.mask)
    terms, metrics = _clipped(ratio, batch, clip_low, clip_high)
    if dual_clip is not None:
        advantages = masked(batch.advantages, batch.mask)
        terms = xp.where(advantages < 0, xp.minimum(terms, -advantages * dual_clip), terms)
    return terms, metrics


@gin.configurable("gspo_loss", module="losses")
def gspo(
    policy: Policy, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossTerms:
    """Group sequence policy optimisation: one ratio a sequence, s = exp(mean of logp - proximal
    over its masked tokens).

    term = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)) with s_t = sg(s) exp(logp -
    sg(logp)): the value of s, and a gradient for each token. Source: arXiv 2507.18071, GSPO-token
    (eq. 13 and 14), which allows one advantage a token.

    Args:
        clip_low: A sequence's ratio is clipped at 1 - clip_low; at least 0.
        clip_high: A sequence's ratio is clipped at 1 + clip_high; at least 0.
    """
    _require_at_least_zero("gspo_loss", clip_low=clip_low, clip_high=clip_high)
    xp = array_namespace(policy.logp)
    logp = masked(policy.logp, batch.mask)
    log_ratio = logp - masked(batch.proximal_logp, batch.mask)
    sequence_ratio = xp.exp(clamp(segment_mean(log_ratio, batch.mask, batch.segment_ids)))
    ratio = stop_gradient(sequence_ratio) * xp.exp(logp - stop_gradient(logp))
    return _clipped(ratio, batch, clip_low, clip_high)


def _require_at_least_zero(loss: str, **bounds: float) -> None:
    """Bounds below 0 would exclude a ratio of 1 and could cross each other."""
    for name, bound in bounds.items():
        at_least(f"{loss}.{name}", bound, 0)


def _clipped(ratio: Array, batch: Batch, clip_low: float, clip_high: float) -> LossTerms:
    """max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); the metric clip_fraction counts
    the tokens whose gradient the clip removed."""
    xp = array_namespace(ratio)
    advantages = masked(batch.advantages, batch.mask)
    plain = -advantages * ratio
    clipped = -advantages * xp.clip(ratio, 1 - clip_low, 1 + clip_high)
    terms = masked(xp.maximum(plain, clipped), batch.mask)
    return terms, {
        "ratio": masked(ratio, batch.mask),
        "clip_fraction": masked(clipped > plain, batch.mask),
    }


@gin.configurable("gmpo_loss", module="losses")
def gmpo(
    policy: Policy, batch: Batch, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> LossTerms:
    """Geometric-mean policy optimisation: log-ratios are clipped token by token, and the sequence's
    ratio is their geometric mean.

    c = min(logp - proximal, clip_high) where A ≥ 0, else max(logp - proximal, -clip_low); s =
    exp(mean of c over the sequence's masked tokens); term = -A sg(s) exp(c - sg(c)): the value of
    s, and no gradient for a clipped token. Source: arXiv 2507.20673.

    Args:
        clip_low: Log-ratios are clipped at -clip_low; at least 0.
        clip_high: Log-ratios are clipped at clip_high; at least 0.
    """
    _require_at_least_zero("gmpo_loss", clip_low=clip_low, clip_high=clip_high)
    xp = array_namespace(policy.logp)
    advantages = masked(batch.advantages, batch.mask)
    log_ratio = masked(policy.logp, batch.mask) - masked(batch.proximal_logp, batch.mask)
    gains = advantages >= 0
    kept = xp.where(gains, log_ratio <= clip_high, log_ratio >= -clip_low)
    bound = xp.where(gains, xp.full_like(log_ratio, clip_high), xp.full_like(log_ratio, -clip_low))
    clipped = xp.where(kept, log_ratio, bound)
    ratio = stop_gradient(xp.exp(clamp(segment_mean(clipped, batch.mask, batch.segment_ids))))
    terms = -advantages * ratio * xp.exp(clipped - stop_gradient(clipped))
    return masked(terms, batch.mask), {
        "ratio": masked(ratio, batch.mask),
        "clip_fraction": masked(~kept, batch.mask),
    }


@gin.configurable("sapo_loss", module="losses")
def sapo(
    policy: Policy, batch: Batch, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossTerms:
    """Soft adaptive policy optimisation: a smooth gate in place of the clip.

    term = -A σ(τ (r - 1)) 4 / τ, with τ = tau_positive where A > 0 and tau_negative elsewhere. At r
    = 1 the gradient is that of REINFORCE. Source: arXiv 2511.20347.

    Args:
        tau_positive: Sharpness of the gate where A > 0; above 0, larger is narrower.
        tau_negative: Sharpness of the gate elsewhere; above 0, larger is narrower.
    """
    positive("sapo_loss.tau_positive", tau_positive)
    positive("sapo_loss.tau_negative", tau_negative)
    xp = array_namespace(policy.logp)
    advantages = masked(batch.advantages, batch.mask)
    ratio = importance_ratio(policy.logp, batch.proximal_logp, batch.mask)
    tau = xp.where(
        advantages > 0, xp.full_like(ratio, tau_positive), xp.full_like(ratio, tau_negative)
    )
    gate = sigmoid(tau * (ratio - 1)) * 4 / tau
    return -advantages * gate, {"ratio": masked(ratio, batch.mask)}


@gin.configurable("cispo_loss", module="losses")
def cispo(
    policy: Policy, batch: Batch, *, clip_high: float = 0.28, clip_low: float | None = None
) -> LossTerms:
    """Clipped importance-sampled policy optimisation: the clipped ratio is a constant weight, so
    every token keeps its gradient.

    term = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp. Source: arXiv 2506.13585.

    Args:
        clip_high: The weight is at most 1 + clip_high; at least 0.
        clip_low: The weight is at least 1 - clip_low; None for no lower bound.
    """
    _require_at_least_zero("cispo_loss", clip_low=clip_low or 0.0, clip_high=clip_high)
    xp = array_namespace(policy.logp)
    ratio = importance_ratio(policy.logp, batch.proximal_logp, batch.mask)
    weight = xp.clip(ratio, None if clip_low is None else 1 - clip_low, 1 + clip_high)
    terms = (
        -stop_gradient(weight)
        * masked(batch.advantages, batch.mask)
        * masked(policy.logp, batch.mask)
    )
    return terms, {
        "ratio": masked(ratio, batch.mask),
        "clip_fraction": masked(weight != ratio, batch.mask),
    }


@gin.configurable("dro_loss", module="losses")
def dro(policy: Policy, batch: Batch, *, beta: float = 0.05) -> LossTerms:
    """Direct reward optimisation, with advantages in place of rewards minus values: a policy
    gradient, and a quadratic pull towards the policy that sampled.

    term = -(A logp - ½ β (logp - behavior)²). Source: arXiv 2405.19107.

    Args:
        beta: Weight of the quadratic term; at least 0.
    """
    at_least("dro_loss.beta", beta, 0)
    logp = masked(policy.logp, batch.mask)
    moved = logp - masked(batch.behavior_logp, batch.mask)
    return beta * moved**2 / 2 - masked(batch.advantages, batch.mask) * logp, {}


@gin.configurable(module="losses")
def dppo_tv(
    policy: Policy, batch: Batch, *, threshold_low: float = 0.15, threshold_high: float = 0.15
) -> LossTerms:
    """Divergence proximal policy optimisation: masks a token by how far its probability has moved,
    not by its ratio.

    term = -A exp(logp - behavior), but 0 where A > 0 and e^logp - e^behavior > threshold_high, or A
    < 0 and e^logp - e^behavior < -threshold_low (the binary estimate of the total variation from
    the policy that sampled). Source: arXiv 2602.04879.

    Args:
        threshold_low: Largest fall of a token's probability where A < 0; at least 0.
        threshold_high: Largest rise of a token's probability where A > 0; at least 0.
    """
    _require_at_least_zero("dppo_tv", threshold_low=threshold_low, threshold_high=threshold_high)
    xp = array_namespace(policy.logp)
    advantages = masked(batch.advantages, batch.mask)
    ratio = importance_ratio(policy.logp, batch.behavior_logp, batch.mask)
    moved = xp.exp(masked(policy.logp, batch.mask)) - xp.exp(
        masked(batch.behavior_logp, batch.mask)
    )
    too_far = xp.where(
        advantages > 0, moved > threshold_high, (advantages < 0) & (moved < -threshold_low)
    )
    terms = masked(-advantages * ratio, batch.mask & ~too_far)
    return terms, {"ratio": masked(ratio, batch.mask), "clip_fraction": masked(too_far, batch.mask)}


@gin.configurable("kpop_loss", module="losses")
def kpop(policy: Policy, batch: Batch, *, threshold: float = 0.1) -> LossTerms:
    """KPop: masks a token whose binary KL divergence from the policy that sampled is too large.

    term = -A exp(logp - behavior), but 0 where max(D(p ‖ q), D(q ‖ p)) > threshold, with p = e^logp,
    q = e^behavior and D(p ‖ q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)): this token against
    all others, whatever the sign of A. p and q are clamped to 1e-6 from 0 and 1. Source: Guo et al.,
    "Taming training-inference mismatch in reinforcement learning with adaptive masking regions"
    (KPop), https://ringtech.notion.site/kpop.

    Args:
        threshold: Largest divergence that is trained on, in nats; at least 0.
    """
    _require_at_least_zero("kpop_loss", threshold=threshold)
    xp = array_namespace(policy.logp)
    advantages = masked(batch.advantages, batch.mask)
    ratio = importance_ratio(policy.logp, batch.behavior_logp, batch.mask)
    p, q = (
        xp.clip(xp.exp(stop_gradient(masked(x, batch.mask))), SURE, 1 - SURE)
        for x in (policy.logp, batch.behavior_logp)
    )
    log_odds = xp.log(p) - xp.log(q), xp.log(1 - p) - xp.log(1 - q)
    forward, backward = (w * log_odds[0] + (1 - w) * log_odds[1] for w in (p, q))
    too_far = xp.maximum(forward, -backward) > threshold
    terms = masked(-advantages * ratio, batch.mask & ~too_far)
    return terms, {"ratio": masked(ratio, batch.mask), "clip_fraction": masked(too_far, batch.mask)}


@gin.configurable(module="losses")
def value_clip(policy: Policy, batch: Batch, *, clip: float = 0.2) -> LossTerms:
    """The critic's squared error, pessimistic about moves of more than `clip` from the values
    before the step.

    term = ½ max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²), V_old = batch.old_values.
    Source: the PPO authors' code; arXiv 2005.12729.

    Args:
        clip: How far a value may move in a step, in units of reward; above 0.
    """
    positive("value_clip.clip", clip)
    xp = array_namespace(policy.values)
    values, returns, old = (
        masked(x, batch.mask) for x in (policy.values, batch.returns, batch.old_values)
    )
    plain = (values - returns) ** 2
    moved = values - old
    clipped = (old + xp.clip(moved, -clip, clip) - returns) ** 2
    # old + (V - old) is not quite V: the second alone would count rounding
    took = (xp.abs(moved) > clip) & (clipped > plain)
    return xp.maximum(plain, clipped) / 2, {
        "value_error": plain,
        "value_clip_fraction": masked(took, batch.mask),
    }


@gin.configurable(module="losses")
def entropy_bonus(policy: Policy, batch: Batch, *, coefficient: float) -> LossTerms:
    """Entropy bonus: term = -coefficient · H, with H the entropy of the full distribution at each
    token, in nats.

    Args:
        coefficient: Weight of the entropy, which the loss rewards; below 0 it is penalised.
    """
    entropy = masked(policy.entropy, batch.mask)
    return -coefficient * entropy, {"entropy": entropy}


@gin.configurable("sft_loss", module="losses")
def sft(policy: Policy, batch: Batch) -> LossTerms:
    """Supervised fine-tuning: term = -logp, the negative log-likelihood of the demonstrated
    token."""
    return -masked(policy.logp, batch.mask), {}


@gin.configurable(module="losses")
def kl_penalty(
    policy: Policy, batch: Batch, *, coefficient: float, estimator: str = "k3"
) -> LossTerms:
    """KL penalty: term = coefficient · kl(logp, reference). Source: GRPO, arXiv 2402.03300 (k3 in
    the loss).

    Args:
        coefficient: Weight of the divergence from the reference model.
        estimator: Per-token estimator: "k1", "k2" or "k3" (`areal_x.algorithms.kl`).
    """
    one_of("kl_penalty.estimator", estimator, tuple(ESTIMATORS))
    kl = ESTIMATORS[estimator](
        masked(policy.logp, batch.mask), masked(batch.reference_logp, batch.mask)
    )
    return masked(coefficient * kl, batch.mask), {"reference_kl": kl}


@gin.configurable(module="losses")
def sampled_reverse_kl(policy: Policy, batch: Batch) -> LossTerms:
    """On-policy distillation: term = -sg(teacher - logp) logp, with teacher = batch.reference_logp,
    the teacher's log-probability of the same token.

    Averaged over tokens sampled from the policy, its gradient is that of KL(student ‖ teacher): a
    policy gradient whose advantage is the teacher's log-probability minus the student's. Source:
    arXiv 2306.13649; MiniLLM, arXiv 2306.08543.
    """
    logp = masked(policy.logp, batch.mask)
    advantage = stop_gradient(masked(batch.reference_logp, batch.mask) - logp)
    return -advantage * logp, {"teacher_kl": -advantage}


@gin.configurable(module="losses")
def clipped_reverse_kl(policy: Policy, batch: Batch, clip: float = 5.0) -> LossTerms:
    """`sampled_reverse_kl` with a bounded advantage: term = -sg(clip(teacher - logp, -c, c)) logp.

    Source: the pointwise clipping of OPSD, arXiv 2601.18734, at the sampled token.

    Args:
        clip: c, in nats; above 0.
    """
    xp = array_namespace(policy.logp)
    logp = masked(policy.logp, batch.mask)
    gap = stop_gradient(masked(batch.reference_logp, batch.mask) - logp)
    bounded = xp.clip(gap, -clip, clip)
    return -bounded * logp, {"teacher_kl": -gap, "clip_fraction": bounded != gap}


@gin.configurable(module="losses")
def divergence(policy: Policy, batch: Batch) -> LossTerms:
    """On-policy distillation with the teacher's full distribution: term = policy.divergence, which
    the trainer computes.

    Source: generalised knowledge distillation, arXiv 2306.13649.
    """
    divergence = masked(policy.divergence, batch.mask)
    return divergence, {"teacher_divergence": divergence}


def policy_gap(policy: Policy, batch: Batch) -> LossTerms:
    """A metric, not a loss: |logp - behavior|, the distance of the trained policy from the one that
    sampled, in nats.

    On-policy it is the numerical mismatch of engine and trainer; off-policy it adds the effect of
    staleness and of earlier minibatches. Tokens that no policy sampled (demonstrations) count 0.
    """
    sampled = (
        batch.mask if batch.versions is None else batch.mask & (batch.versions != NOT_THE_POLICY)
    )
    gap = masked(policy.logp, sampled) - masked(batch.behavior_logp, sampled)
    xp = array_namespace(gap)
    return xp.zeros_like(gap), {"policy_gap": xp.abs(gap)}


@dataclass(frozen=True)
class Combined:
    """The sum of losses whose hyperparameters are already bound. Raises ValueError if two report
    the same metric."""

    losses: tuple[Loss, ...]

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        terms, metrics = evaluate_loss(self.losses[0], policy, batch)
        for loss in self.losses[1:]:
            more, named = evaluate_loss(loss, policy, batch)
            if twice := metrics.keys() & named.keys():
                raise ValueError(
                    f"two of the combined losses report the metric {sorted(twice)[0]!r}: rename one"
                )
            terms, metrics = terms + more, metrics | named
        return terms, metrics


@dataclass(frozen=True)
class Scaled:
    """A loss times a factor. Its metrics are not scaled."""

    loss: Loss
    factor: float

    def __call__(self, policy: Policy, batch: Batch) -> LossTerms:
        terms, metrics = evaluate_loss(self.loss, policy, batch)
        return self.factor * terms, metrics


def combine(*losses: Loss) -> Loss:
    """The sum of losses, each with its hyperparameters already bound (functools.partial or gin)."""
    return Combined(losses)


def summands(loss: Loss, factor: float = 1.0) -> list[tuple[float, Loss]]:
    """The losses that a combined loss adds up, each with its factor; any other loss is itself."""
    if isinstance(loss, Combined):
        return [one for part in loss.losses for one in summands(part, factor)]
    if isinstance(loss, Scaled):
        return summands(loss.loss, factor * loss.factor)
    return [(factor, loss)]
