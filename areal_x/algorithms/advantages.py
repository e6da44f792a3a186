"""Advantages from rewards, computed on the host before the optimizer step, for numpy, jax and torch
arrays.

`[S]` holds one value a sequence; `groups [S]` holds any integers, equal for the sequences of one
task. `[S, T]` holds one value a token, one sequence a row; masked-out entries are ignored, and the
result there is 0.
"""

from __future__ import annotations

import gin
import numpy as np
from array_api_compat import array_namespace, is_numpy_array
from jaxtyping import Bool, Float, Int

from areal_x.algorithms.arrays import lift, masked, segment_sum
from areal_x.errors import one_of, within
from areal_x.types import Array


@gin.configurable(module="advantages")
def group_relative(
    rewards: Float[Array, " S"], groups: Int[Array, " S"], scale: str = "group", eps: float = 1e-6
) -> Float[Array, " S"]:
    """(r_i - mean of its group) / (std + eps), unbiased std (n - 1). `groups[i]` identifies the
    task of sequence i.

    A group of one, or one whose rewards are all equal, gives exactly 0. Source: GRPO, arXiv
    2402.03300; scale "none" Dr. GRPO, arXiv 2503.20783; "batch" Lite PPO, arXiv 2508.08221.

    Args:
        scale: "group" divides by the group's standard deviation, "batch" by that of all rewards,
            "none" by 1.
        eps: Added to the standard deviation, in units of reward.
    """
    one_of("group_relative.scale", scale, ("group", "batch", "none"))
    xp = array_namespace(rewards)
    relative, group = _from_first_of_group(rewards, groups)
    deviation = relative - _mean(relative, group)
    if scale == "none":
        return deviation
    if scale == "batch":
        one_group = xp.zeros_like(group)
        relative, _ = _from_first_of_group(rewards, one_group)
        std = _std(relative - _mean(relative, one_group), one_group)
    else:
        std = _std(deviation, group)
    return deviation / xp.where(std > 0, std + eps, xp.ones_like(std))


@gin.configurable(module="advantages")
def leave_one_out(rewards: Float[Array, " S"], groups: Int[Array, " S"]) -> Float[Array, " S"]:
    """r_i - mean of the others in its group; a group of one, or one whose rewards are all equal,
    gives exactly 0.

    Source: RLOO, arXiv 2402.14740.
    """
    relative, group = _from_first_of_group(rewards, groups)
    return relative - (_sum(relative, group) - relative) / _others(relative, group)


@gin.configurable(module="advantages")
def length_weighted_baseline(
    rewards: Float[Array, " S"], lengths: Int[Array, " S"], groups: Int[Array, " S"]
) -> Float[Array, " S"]:
    """r_i - Σ l r / Σ l over its group: the baseline of minimum variance if a gradient's squared
    norm is proportional to the length l (tokens sampled from the policy).

    A group of one, or one whose rewards are all equal, gives exactly 0. Source: OPO, arXiv
    2505.23585.
    """
    relative, group = _from_first_of_group(rewards, groups)
    xp = array_namespace(relative)
    lengths = xp.astype(xp.asarray(lengths), relative.dtype)
    total = _sum(lengths, group)
    return relative - _sum(lengths * relative, group) / xp.where(
        total > 0, total, xp.ones_like(total)
    )


@gin.configurable(module="advantages")
def mean_normalized(rewards: Float[Array, " S"], groups: Int[Array, " S"]) -> Float[Array, " S"]:
    """(r_i - mean of its group) / mean of its group, for rewards of at least 0; a group whose mean is
    not above 0, and one whose rewards are all equal, give exactly 0.

    With rewards of 0 and 1 and n attempts, the gradient is an unbiased estimate of that of Σ_{k<n}
    pass@k / k, which tends to that of the log-likelihood of a correct answer as n grows. Source:
    MaxRL, arXiv 2602.02710.
    """
    xp = array_namespace(rewards)
    relative, group = _from_first_of_group(rewards, groups)
    mean = _mean(lift(rewards), group)
    positive = mean > 0
    deviation = relative - _mean(relative, group)
    return xp.where(
        positive, deviation / xp.where(positive, mean, xp.ones_like(mean)), 0 * deviation
    )


def greedy_baseline(
    rewards: Float[Array, " S"], greedy_rewards: Float[Array, " S"]
) -> Float[Array, " S"]:
    """r_i - the reward of the greedy answer to the same task. Source: ReMax, arXiv 2310.10505."""
    return lift(rewards) - lift(greedy_rewards)


@gin.configurable(module="advantages")
def gae(
    rewards: Float[Array, "S T"],
    values: Float[Array, "S T"],
    mask: Bool[Array, "S T"],
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "S T"], Float[Array, "S T"]]:
    """Generalised advantage estimation: (advantages, returns), where returns = A + V is the
    critic's target, before any whitening.

    A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t, where t + 1 is the next *masked* token and
    values after the last one are 0: tokens that the policy did not sample (a tool's output) are
    skipped without discount. Source: arXiv 1506.02438, eq. 16.

    Args:
        gamma: Discount γ per token, from 0 to 1.
        lam: λ, from 0 (one-step estimates) to 1 (full returns).
    """
    within("gae.gamma", gamma, 0, 1)
    within("gae.lam", lam, 0, 1)
    xp = array_namespace(rewards)
    rewards, values = masked(rewards, mask), masked(values, mask)
    # at t, the value of the first masked token from t on
    upcoming = _backward(values, _discounts(mask, 0.0, values))
    following = xp.concat([upcoming[:, 1:], xp.zeros_like(values[:, :1])], axis=1)
    deltas = masked(rewards + gamma * following - values, mask)
    advantages = masked(_backward(deltas, _discounts(mask, gamma * lam, values)), mask)
    return advantages, advantages + values


@gin.configurable(module="advantages")
def turn_gae(
    rewards: Float[Array, "S T"],
    values: Float[Array, "S T"],
    mask: Bool[Array, "S T"],
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "S T"], Float[Array, "S T"]]:
    """Generalised advantage estimation over turns: (advantages, returns), before any whitening. A turn
    is a run of adjacent masked tokens, one action whose state is what precedes it.

    A_k = δ_k + γλ A_{k+1}, δ_k = R_k + γ V_{k+1} - V_k, with R_k the sum of the rewards of turn k and
    V_k the value at its first token. All tokens of a turn have its advantage, and its return A_k +
    V_k as the critic's target. Source: Turn-PPO, arXiv 2512.17008.

    Args:
        gamma: Discount γ per turn, from 0 to 1.
        lam: λ, from 0 (one-turn estimates) to 1 (full returns).
    """
    within("turn_gae.gamma", gamma, 0, 1)
    within("turn_gae.lam", lam, 0, 1)
    xp = array_namespace(rewards)
    rewards, values = masked(rewards, mask), masked(values, mask)
    none = xp.zeros_like(mask[:, :1])
    first = mask & ~xp.concat([none, mask[:, :-1]], axis=1)
    goes_on = mask & xp.concat([mask[:, 1:], none], axis=1)
    turn_rewards = _backward(rewards, xp.astype(goes_on, values.dtype))
    # at t, the value at the beginning of the first turn from t on
    upcoming = _backward(masked(values, first), _discounts(first, 0.0, values))
    following = xp.concat([upcoming[:, 1:], xp.zeros_like(values[:, :1])], axis=1)
    deltas = masked(turn_rewards + gamma * following - values, first)
    of_turns = masked(_backward(deltas, _discounts(first, gamma * lam, values)), first)
    advantages, at_start = (
        masked(_forward(masked(x, first), _discounts(first, 0.0, values)), mask)
        for x in (of_turns, values)
    )
    return advantages, advantages + at_start


def bootstrapped(
    rewards: Float[Array, "S T"],
    values: Float[Array, "S T"],
    mask: Bool[Array, "S T"],
    truncated: Bool[Array, " S"],
    gamma: float,
) -> Float[Array, "S T"]:
    """Rewards of sequences some of which were cut off and did not end: γ V is added to the last masked
    token's, with V the value at this token, taken for that after it. `gae` then computes with V after
    the end where it has 0. Source: partial-episode bootstrapping, arXiv 1712.00378."""
    xp = array_namespace(rewards)
    count = xp.cumulative_sum(xp.astype(mask, xp.int32), axis=1)
    last = mask & (count == count[:, -1:])
    return masked(rewards, mask) + gamma * masked(values, last & truncated[:, None])


@gin.configurable(module="advantages")
def returns_to_go(
    rewards: Float[Array, "S T"], mask: Bool[Array, "S T"], gamma: float = 1.0
) -> Float[Array, "S T"]:
    """R_t = r_t + γ R_{t+1}, where t + 1 is the next masked token, as in `gae`.

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        gamma: Discount γ per token, from 0 to 1.
    """
    within("returns_to_go.gamma", gamma, 0, 1)
    rewards = masked(rewards, mask)
    return masked(_backward(rewards, _discounts(mask, gamma, rewards)), mask)


def whiten(
    advantages: Float[Array, "S T"], mask: Bool[Array, "S T"], eps: float = 1e-8
) -> Float[Array, "S T"]:
    """(A - mean) / sqrt(var + eps) over all masked tokens, unbiased var; equal advantages give
    exactly 0.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    xp = array_namespace(advantages)
    live = masked(advantages, mask)
    top = xp.max(xp.where(mask, live, xp.full_like(live, -xp.inf)))
    # relative to the maximum, so that equal advantages are 0 and not the rounding of their mean
    relative = masked(live - top, mask)
    tokens = xp.sum(xp.astype(mask, relative.dtype))
    deviation = masked(relative - xp.sum(relative) / xp.clip(tokens, 1, None), mask)
    variance = xp.sum(deviation**2) / xp.clip(tokens - 1, 1, None)
    return deviation / xp.sqrt(variance + eps)


def whitened_returns(
    rewards: np.ndarray,
    mask: np.ndarray,
    groups: np.ndarray,
    gamma: float = 1.0,
    baseline: bool = False,
) -> np.ndarray:
    """Whitened returns to go (see `returns_to_go` and `whiten`); with `baseline`, the group's mean
    reward is subtracted first. Source: REINFORCE++, arXiv 2501.03262."""
    if baseline:
        totals = rewards.sum(1)
        means = totals - group_relative(totals, groups, scale="none")
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
        rewards = rewards.copy()
        rewards[np.arange(len(rewards)), last] -= means * mask.any(1)
    return np.asarray(whiten(returns_to_go(rewards, mask, gamma), mask))


def whitened_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    gamma: float = 1.0,
    lam: float = 1.0,
    truncated: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates, whitened over the batch, and the returns that the critic is
    trained on (see `gae`, `bootstrapped` and `whiten`). Source: PPO, arXiv 1707.06347; whitening: Stiennon et al.,
    arXiv 2009.01325."""
    if truncated is not None:
        rewards = bootstrapped(rewards, values, mask, truncated, gamma)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    return np.asarray(whiten(advantages, mask)), np.asarray(returns)


def whitened_turn_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    gamma: float = 1.0,
    lam: float = 1.0,
    truncated: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantage estimates of turns, whitened over the batch, and the returns that the critic is
    trained on (see `turn_gae`, `bootstrapped` and `whiten`). Source: Turn-PPO, arXiv 2512.17008."""
    if truncated is not None:
        rewards = bootstrapped(rewards, values, mask, truncated, gamma)
    advantages, returns = turn_gae(rewards, values, mask, gamma, lam)
    return np.asarray(whiten(advantages, mask)), np.asarray(returns)


@gin.configurable(module="advantages")
def discount_turns(turn_rewards: Float[Array, "... K"], gamma: float) -> Float[Array, "... K"]:
    """r_k += γ · r_{k+1}, from the last turn back: a turn is credited with the rewards that follow
    it.

    Source: Kevin, arXiv 2507.11948.

    Args:
        gamma: Discount γ per turn, from 0 to 1.
    """
    within("discount_turns.gamma", gamma, 0, 1)
    turn_rewards = lift(turn_rewards)
    return _backward(turn_rewards, array_namespace(turn_rewards).zeros_like(turn_rewards) + gamma)


def _from_first_of_group(rewards: Array, groups: Array) -> tuple[Array, Array]:
    """Each reward minus the first of its group, and the groups renumbered below S.

    Advantages do not depend on a group's level, and this makes equal rewards exactly 0. Otherwise
    the rounding of their mean, divided by eps, would look like an advantage.
    """
    xp = array_namespace(rewards)
    rewards, groups = lift(rewards), xp.asarray(groups)
    order = xp.argsort(groups)
    numbers = xp.searchsorted(xp.take(groups, order), groups)
    return rewards - xp.take(rewards, xp.take(order, numbers)), numbers


def _sum(values: Array, group: Array) -> Array:
    return segment_sum(values[None, :], group[None, :])[0, :]


def _mean(values: Array, group: Array) -> Array:
    return _sum(values, group) / _sum(array_namespace(values).ones_like(values), group)


def _std(deviation: Array, group: Array) -> Array:
    return array_namespace(deviation).sqrt(_sum(deviation**2, group) / _others(deviation, group))


def _others(values: Array, group: Array) -> Array:
    """Number of others in the group, n - 1, as a divisor: 1 if there are none, where the dividend
    is 0."""
    xp = array_namespace(values)
    return xp.clip(_sum(xp.ones_like(values), group) - 1, 1, None)


def _discounts(mask: Array, discount: float, like: Array) -> Array:
    """The discount where masked, 1 elsewhere: an unmasked token passes the later sum through."""
    xp = array_namespace(like)
    return xp.where(mask, xp.full_like(like, discount), xp.ones_like(like))


def _forward(terms: Array, factors: Array) -> Array:
    """Scan y_t = terms_t + factors_t · y_{t-1} along the last axis, with y = 0 before its beginning."""
    xp = array_namespace(terms)
    return xp.flip(_backward(xp.flip(terms, axis=-1), xp.flip(factors, axis=-1)), axis=-1)


def _backward(terms: Array, factors: Array) -> Array:
    """Reverse scan y_t = terms_t + factors_t · y_{t+1} along the last axis, with y = 0 past its
    end."""
    xp = array_namespace(terms)
    length = terms.shape[-1]
    if is_numpy_array(terms):
        result = terms.copy()
        for t in reversed(range(length - 1)):
            result[..., t] += factors[..., t] * result[..., t + 1]
        return result

    def from_later(x: Array, steps: int) -> Array:
        return xp.concat([x[..., steps:], xp.zeros_like(x[..., :steps])], axis=-1)

    # After k rounds y_t = terms_t + factors_t · y_{t + 2^k}: log2(T) rounds instead of a loop over
    # T, which jit would unroll.
    steps = 1
    while steps < length:
        terms, factors = (
            terms + factors * from_later(terms, steps),
            factors * from_later(factors, steps),
        )
        steps *= 2
    return terms
