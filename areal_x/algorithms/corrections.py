"""Importance weights that correct for the difference between the proximal policy and the one that
sampled. Computed on the host, over the optimizer batch.

Each is `(log_ratio, mask, segment_ids, …) → [rows, length]`, 0 where masked out, with d = log_ratio
= proximal - behavior. The result multiplies the weight of each token; the weights' denominators do
not change. All are constants: no gradient flows.

`level` is the ratio that a token gets: "token" its own, exp d; "sequence" exp Σ d and "geometric"
exp mean d, over the masked tokens of its sequence. Any other level raises a ConfigError.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_jax_array

from areal_x.algorithms import arrays
from areal_x.algorithms.arrays import clamp, segment_mean, segment_sum, stop_gradient
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.errors import ConfigError, at_least, one_of, positive
from areal_x.types import Array

LEVELS = ("token", "sequence", "geometric")
REJECTION_LEVELS = ("token", "sequence", "sum", "max")


@gin.configurable(module="corrections")
def importance(log_ratio: Array, mask: Array, segment_ids: Array, level: str = "token") -> Array:
    """The importance ratio, unbiased at level "sequence"; the log-ratio of the level is clamped to
    ±20 before exp.

    Args:
        level: "token" for each token's own ratio, "sequence" for the product over its sequence,
            "geometric" for the geometric mean over its sequence.
    """
    one_of("importance.level", level, LEVELS)
    return _importance(log_ratio, mask, segment_ids, level)


@gin.configurable(module="corrections")
def truncated(
    log_ratio: Array, mask: Array, segment_ids: Array, cap: float = 2.0, level: str = "token"
) -> Array:
    """min(importance ratio, cap).

    Source: truncated importance sampling, Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training".

    Args:
        cap: Largest weight; above 0.
        level: "token" for each token's own ratio, "sequence" for the product over its sequence,
            "geometric" for the geometric mean over its sequence.
    """
    positive("truncated.cap", cap)
    one_of("truncated.level", level, LEVELS)
    return array_namespace(log_ratio).clip(
        _importance(log_ratio, mask, segment_ids, level), None, cap
    )


@gin.configurable(module="corrections")
def masked(
    log_ratio: Array,
    mask: Array,
    segment_ids: Array,
    low: float | None = None,
    high: float | None = 5.0,
    level: str = "token",
    reweight: bool = True,
) -> Array:
    """The importance ratio where low ≤ ratio ≤ high, else 0.

    Source: IcePop (level "token", 0.5 to 5), arXiv 2510.18855; MIS is level "sequence"; AReaL,
    arXiv 2505.24298.

    Args:
        low: Smallest ratio that is kept, from 0 to high; None for no bound.
        high: Largest ratio that is kept, above 0; None for no bound.
        level: "token" for each token's own ratio, "sequence" for the product over its sequence,
            "geometric" for the geometric mean over its sequence.
        reweight: Whether kept tokens are weighted by their ratio; otherwise by 1.
    """
    one_of("masked.level", level, LEVELS)
    if low is not None:
        at_least("masked.low", low, 0)
    if high is not None:
        positive("masked.high", high)
        if low is not None and low > high:
            raise ConfigError("masked.low", low, f"at most masked.high = {high}")
    xp = array_namespace(log_ratio)
    ratio = _importance(log_ratio, mask, segment_ids, level)
    kept = mask
    if low is not None:
        kept = kept & (ratio >= low)
    if high is not None:
        kept = kept & (ratio <= high)
    return arrays.masked(ratio if reweight else xp.ones_like(ratio), kept)


@gin.configurable(module="corrections")
def rejected(
    log_ratio: Array,
    mask: Array,
    segment_ids: Array,
    metric: str = "k3",
    level: str = "sequence",
    low: float | None = None,
    high: float | None = 0.01,
) -> Array:
    """Rejection sampling by an estimate of the KL divergence of the proximal policy from the one that
    sampled: 1 where low ≤ metric ≤ high, else 0.

    At a token: k1 = -d (of either sign), k2 = d² / 2, k3 = exp d - 1 - d, the last with d clamped to
    ±20 (`areal_x.algorithms.kl`). A sequence is kept or rejected as a whole. Source: Liu et al., "When
    speed kills stability: demystifying RL collapse from the training-inference mismatch"; estimators:
    Schulman, "Approximating KL divergence".

    Args:
        metric: "k1", "k2" or "k3".
        level: "token" for each token's own, "sequence" for the mean over its sequence, "sum" for the
            sum over its sequence, "max" for rejecting a sequence with any token outside.
        low: Smallest value that is kept, in nats; None for no bound.
        high: Largest value that is kept, in nats; None for no bound.
    """
    one_of("rejected.metric", metric, tuple(ESTIMATORS))
    one_of("rejected.level", level, REJECTION_LEVELS)
    if low is not None and high is not None and low > high:
        raise ConfigError("rejected.low", low, f"at most rejected.high = {high}")
    own = arrays.masked(stop_gradient(log_ratio), mask)
    xp = array_namespace(own)
    x = arrays.masked(ESTIMATORS[metric](xp.zeros_like(own), own), mask)
    if level == "sum":
        x = segment_sum(x, segment_ids)
    if level == "sequence":
        x = segment_mean(x, mask, segment_ids)
    outside = xp.zeros_like(mask)
    if low is not None:
        outside = outside | (x < low)
    if high is not None:
        outside = outside | (x > high)
    if level == "max":
        count = segment_sum(xp.astype(outside & mask, x.dtype), segment_ids)
        outside = count > 0
    return arrays.masked(xp.ones_like(x), mask & ~outside)


@gin.configurable(module="corrections")
def second_moment(
    log_ratio: Array, mask: Array, segment_ids: Array, threshold: float = 0.04
) -> Array:
    """1 for kept tokens, 0 for those of the largest d², which are masked until the mean d² of the
    rest is ≤ threshold.

    Tokens of equal d² are kept or masked together, and those of the smallest are always kept. Must
    be called with the whole optimizer batch. Source: M2PO, arXiv 2510.01161.

    Args:
        threshold: Largest mean squared log-ratio that is kept, in nats²; at least 0.
    """
    at_least("second_moment.threshold", threshold, 0)
    xp = array_namespace(log_ratio)
    squares = arrays.masked(stop_gradient(log_ratio), mask) ** 2
    infinite = xp.full_like(squares, xp.inf)
    ordered = xp.sort(xp.reshape(xp.where(mask, squares, infinite), (-1,)))
    # A running sum over millions of float32 loses digits; jax has no float64 unless it is enabled.
    sums = xp.cumulative_sum(ordered, dtype=None if is_jax_array(ordered) else xp.float64)
    # number of tokens with at most this d², ties included
    up_to = xp.searchsorted(ordered, ordered, side="right")
    affordable = xp.take(sums, up_to - 1) <= threshold * xp.astype(up_to, sums.dtype)
    largest = xp.max(xp.where(affordable, ordered, xp.full_like(ordered, -xp.inf)))
    return arrays.masked(xp.ones_like(squares), mask & (squares <= xp.maximum(largest, ordered[0])))


def importance_of_trusted(
    log_ratio: Array, mask: Array, segment_ids: Array, threshold: float = 0.04
) -> Array:
    """The importance ratio of the tokens that `second_moment` keeps, 0 for the others. Source:
    M2PO, arXiv 2510.01161."""
    kept = second_moment(log_ratio, mask, segment_ids, threshold)
    return kept * importance(log_ratio, mask, segment_ids)


def _importance(log_ratio: Array, mask: Array, segment_ids: Array, level: str) -> Array:
    own = arrays.masked(stop_gradient(log_ratio), mask)
    if level == "sequence":
        own = segment_sum(own, segment_ids)
    if level == "geometric":
        own = segment_mean(own, mask, segment_ids)
    return arrays.masked(array_namespace(own).exp(clamp(own)), mask)
