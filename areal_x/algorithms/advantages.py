"""How much better than expected: advantages from rewards (host, before the step), for numpy, jax
and torch arrays alike.

`[S]` holds one value a sequence, and `groups [S]` any integers, equal for the sequences of one
task. `[S, T]` holds one value a token, one sequence a row; what stands behind a mask changes
nothing, and the result there is 0.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_numpy_array
from jaxtyping import Bool, Float, Int

from areal_x.algorithms.arrays import lift, masked, segment_sum
from areal_x.errors import one_of, within
from areal_x.types import Array


@gin.configurable(module="advantages")
def group_relative(
    rewards: Float[Array, " S"], groups: Int[Array, " S"], scale: str = "group", eps: float = 1e-6
) -> Float[Array, " S"]:
    """(r_i - mean of its group) / (std + eps), unbiased std (n - 1). `groups[i]` names the task of
    sequence i.

    scale: "group" divides by the group's std, "batch" by that of all rewards, "none" by nothing. A
    group of one, or one whose rewards are all equal, gives exactly 0. Raises ConfigError for
    another scale. Source: GRPO, arXiv 2402.03300; scale "none" Dr. GRPO, arXiv 2503.20783; "batch"
    Lite PPO, arXiv 2508.08221.
    """
    one_of("group_relative.scale", scale, ("group", "batch", "none"))
    xp = array_namespace(rewards)
    relative, group = _from_first_of_group(rewards, groups)
    deviation = relative - _mean(relative, group)
    if scale == "none":
        return deviation
    if scale == "batch":
        everyone = xp.zeros_like(group)
        relative, _ = _from_first_of_group(rewards, everyone)
        std = _std(relative - _mean(relative, everyone), everyone)
    else:
        std = _std(deviation, group)
    return deviation / xp.where(std > 0, std + eps, xp.ones_like(std))


@gin.configurable(module="advantages")
def leave_one_out(rewards: Float[Array, " S"], groups: Int[Array, " S"]) -> Float[Array, " S"]:
    """r_i - mean of the others of its group; a group of one, or one whose rewards are all equal,
    gives exactly 0.

    Source: RLOO, arXiv 2402.14740.
    """
    relative, group = _from_first_of_group(rewards, groups)
    return relative - (_sum(relative, group) - relative) / _others(relative, group)


@gin.configurable(module="advantages")
def length_weighted_baseline(
    rewards: Float[Array, " S"], lengths: Int[Array, " S"], groups: Int[Array, " S"]
) -> Float[Array, " S"]:
    """r_i - Σ l r / Σ l over its group: the baseline of least variance where a gradient's squared
    norm is proportional to the length l.

    lengths: tokens that the policy produced. A group of one, or one whose rewards are all equal,
    gives exactly 0. Source: OPO, arXiv 2505.23585.
    """
    relative, group = _from_first_of_group(rewards, groups)
    xp = array_namespace(relative)
    lengths = xp.astype(xp.asarray(lengths), relative.dtype)
    total = _sum(lengths, group)
    return relative - _sum(lengths * relative, group) / xp.where(
        total > 0, total, xp.ones_like(total)
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
    """Generalised advantage estimation: (advantages, returns), returns = A + V, the critic's
    target, before any whitening.

    A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t, where t + 1 is the next *masked* token and
    after the last one is 0: what the policy did not write (a tool's output) is stepped over without
    discount. gamma: γ. lam: λ. Raises ConfigError unless both are between 0 and 1. Source: arXiv
    1506.02438, eq. 16.
    """
    within("gae.gamma", gamma, 0, 1)
    within("gae.lam", lam, 0, 1)
    xp = array_namespace(rewards)
    rewards, values = masked(rewards, mask), masked(values, mask)
    # the value of the first masked token from t on
    from_here_on = _backward(values, _discounts(mask, 0.0, values))
    following = xp.concat([from_here_on[:, 1:], xp.zeros_like(values[:, :1])], axis=1)
    deltas = masked(rewards + gamma * following - values, mask)
    advantages = masked(_backward(deltas, _discounts(mask, gamma * lam, values)), mask)
    return advantages, advantages + values


@gin.configurable(module="advantages")
def returns_to_go(
    rewards: Float[Array, "S T"], mask: Bool[Array, "S T"], gamma: float = 1.0
) -> Float[Array, "S T"]:
    """R_t = r_t + γ R_{t+1}, where t + 1 is the next masked token, as in `gae`. Raises ConfigError
    unless 0 ≤ γ ≤ 1.

    Source: REINFORCE++, arXiv 2501.03262.
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
    # so that equal advantages are 0 and not the rounding of their mean
    relative = masked(live - top, mask)
    tokens = xp.sum(xp.astype(mask, relative.dtype))
    deviation = masked(relative - xp.sum(relative) / xp.clip(tokens, 1, None), mask)
    variance = xp.sum(deviation**2) / xp.clip(tokens - 1, 1, None)
    return deviation / xp.sqrt(variance + eps)


@gin.configurable(module="advantages")
def discount_turns(turn_rewards: Float[Array, "... K"], gamma: float) -> Float[Array, "... K"]:
    """r_k += γ · r_{k+1}, from the last turn back: a turn is credited with what it led to. Raises
    ConfigError unless 0 ≤ γ ≤ 1.

    Source: Kevin, arXiv 2507.11948.
    """
    within("discount_turns.gamma", gamma, 0, 1)
    turn_rewards = lift(turn_rewards)
    return _backward(turn_rewards, array_namespace(turn_rewards).zeros_like(turn_rewards) + gamma)


def _from_first_of_group(rewards: Array, groups: Array) -> tuple[Array, Array]:
    """Each reward minus that of the first of its group, and for each group a number below S.

    No advantage depends on a group's level, and so equal rewards are exactly 0. Left as they are,
    the rounding of their mean divided by eps would look like an advantage.
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
    """How many others are in the group: n - 1, and 1 where there are none, as what is divided is 0
    there."""
    xp = array_namespace(values)
    return xp.clip(_sum(xp.ones_like(values), group) - 1, 1, None)


def _discounts(mask: Array, discount: float, like: Array) -> Array:
    """The discount where masked, 1 elsewhere: an unmasked token passes on what comes after it."""
    xp = array_namespace(like)
    return xp.where(mask, xp.full_like(like, discount), xp.ones_like(like))


def _backward(terms: Array, factors: Array) -> Array:
    """y_t = terms_t + factors_t · y_{t+1} along the last axis, 0 after its end."""
    xp = array_namespace(terms)
    length = terms.shape[-1]
    if is_numpy_array(terms):
        result = terms.copy()
        for t in reversed(range(length - 1)):
            result[..., t] += factors[..., t] * result[..., t + 1]
        return result

    def from_later(x: Array, steps: int) -> Array:
        return xp.concat([x[..., steps:], xp.zeros_like(x[..., :steps])], axis=-1)

    # After k rounds y_t = terms_t + factors_t · y_{t + 2^k}: log2(T) rounds and no loop over T,
    # which jit would unroll.
    steps = 1
    while steps < length:
        terms, factors = (
            terms + factors * from_later(terms, steps),
            factors * from_later(factors, steps),
        )
        steps *= 2
    return terms
