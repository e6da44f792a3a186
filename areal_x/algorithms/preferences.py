"""Preference losses over pairs of a chosen and a rejected answer: elementwise formulas, and the
same as losses over packed rows.

In a row, a pair is two adjacent segments, ids 2k - 1 (chosen) and 2k (rejected), so (id + 1) // 2
identifies the pair. Every masked token of a pair has the pair's loss as its term, whose gradient
reaches all tokens of the pair: weights that sum to 1 / pairs over a pair give the mean over pairs.
A pair with one half missing, or without masked tokens, contributes 0.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace

from areal_x.algorithms.arrays import lift, masked, segment_sum, softplus
from areal_x.types import Array, Batch, LossTerms, Policy


def bradley_terry(chosen_rewards: Array, rejected_rewards: Array) -> Array:
    """[pairs] → [pairs]: -log σ(chosen - rejected), finite for any margin. Source: arXiv
    2203.02155, eq. 1."""
    return softplus(lift(rejected_rewards) - lift(chosen_rewards))


def dpo(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float = 0.1
) -> Array:
    """[pairs] → [pairs]: -log σ(β ((chosen - ref_chosen) - (rejected - ref_rejected))), finite for
    any margin.

    The arguments are log-probabilities summed over a whole answer. Source: direct preference
    optimisation, arXiv 2305.18290, eq. 7.
    """
    return bradley_terry(
        beta * (lift(chosen) - lift(ref_chosen)), beta * (lift(rejected) - lift(ref_rejected))
    )


def ipo(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float = 0.1
) -> Array:
    """[pairs] → [pairs]: (((chosen - ref_chosen) - (rejected - ref_rejected)) - 1 / (2 β))².

    The arguments are log-probabilities averaged over the tokens of an answer. Source: identity
    preference optimisation, arXiv 2310.12036, eq. 17, where β is called τ.
    """
    margin = (lift(chosen) - lift(ref_chosen)) - (lift(rejected) - lift(ref_rejected))
    return (margin - 1 / (2 * beta)) ** 2


@gin.configurable(module="preferences")
def dpo_loss(policy: Policy, batch: Batch, *, beta: float = 0.1) -> LossTerms:
    """`dpo` of policy.logp and batch.reference_logp, summed over the masked tokens of each half of
    a pair.

    Args:
        beta: Strength of the implied KL constraint to the reference; above 0.
    """
    # β(logp - ref) is the reward that DPO implies. Subtracted before it is summed, because the sums
    # are large and nearly equal.
    rewards = beta * (masked(policy.logp, batch.mask) - masked(batch.reference_logp, batch.mask))
    chosen, rejected = _halves(rewards, batch.segment_ids)
    return _of_pairs(bradley_terry(chosen, rejected), chosen - rejected, batch)


@gin.configurable(module="preferences")
def ipo_loss(policy: Policy, batch: Batch, *, beta: float = 0.1) -> LossTerms:
    """`ipo` of policy.logp and batch.reference_logp, averaged over the masked tokens of each half
    of a pair.

    Args:
        beta: Strength of the regularisation towards the reference; above 0.
    """
    chosen, rejected = _halves(_share(policy.logp, batch), batch.segment_ids)
    ref_chosen, ref_rejected = _halves(_share(batch.reference_logp, batch), batch.segment_ids)
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return _of_pairs(ipo(chosen, rejected, ref_chosen, ref_rejected, beta), margin, batch)


@gin.configurable(module="preferences")
def reward_model_loss(policy: Policy, batch: Batch) -> LossTerms:
    """`bradley_terry` of policy.values at the last masked token of each half, which is the reward
    model's score of an answer."""
    rewards = masked(policy.values, _last_masked(batch.mask, batch.segment_ids))
    chosen, rejected = _halves(rewards, batch.segment_ids)
    return _of_pairs(bradley_terry(chosen, rejected), chosen - rejected, batch)


def _halves(values: Array, segment_ids: Array) -> tuple[Array, Array]:
    """[R, L] → two of [R, L]: for each token the sum over the chosen and over the rejected half of
    its pair."""
    chosen, pair = segment_ids % 2 == 1, (segment_ids + 1) // 2
    return segment_sum(masked(values, chosen), pair), segment_sum(masked(values, ~chosen), pair)


def _of_pairs(losses: Array, margin: Array, batch: Batch) -> LossTerms:
    """The pair's loss at each masked token of a complete pair. margin: reward of the chosen half
    minus that of the rejected half."""
    chosen, rejected = _halves(batch.mask, batch.segment_ids)
    complete = batch.mask & (chosen > 0) & (rejected > 0)
    return masked(losses, complete), {
        "margin": masked(margin, complete),
        "pair_accuracy": masked(margin > 0, complete),
    }


def _share(logp: Array, batch: Batch) -> Array:
    """Each masked token's contribution to its segment's mean."""
    xp = array_namespace(logp)
    ones = lift(batch.mask)
    count = segment_sum(ones, batch.segment_ids)
    return masked(logp, batch.mask) / xp.where(count > 0, count, xp.ones_like(count))


def _last_masked(mask: Array, segment_ids: Array) -> Array:
    """[R, L] → [R, L]: True at the last masked token of each segment; segments are contiguous."""
    xp = array_namespace(segment_ids)
    seen = xp.cumulative_sum(xp.astype(mask, segment_ids.dtype), axis=1)
    following = xp.concat([segment_ids[:, 1:], xp.full_like(segment_ids[:, :1], -1)], axis=1)
    seen_at_end = segment_sum(
        xp.where(segment_ids != following, seen, xp.zeros_like(seen)), segment_ids
    )
    return mask & (seen == seen_at_end)
