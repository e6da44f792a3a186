"""The policy that sampled is not the policy that is anchored to: weights that correct for it (host,
over the optimizer batch).

Each is `(log_ratio, mask, segment_ids, …) → [rows, length]`, 0 behind the mask, with d = log_ratio
= proximal - behavior. The result multiplies the weight of each token; denominators stay those
before. All are constants: no gradient flows.

`level` says whose ratio a token gets: "token" its own, exp d; "sequence" exp Σ d and "geometric"
exp mean d, over the masked tokens of its sequence. Another level is a ConfigError.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_jax_array

from areal_x.algorithms import arrays
from areal_x.algorithms.arrays import clamp, segment_mean, segment_sum, stop_gradient
from areal_x.errors import ConfigError, at_least, one_of, positive
from areal_x.types import Array

LEVELS = ("token", "sequence", "geometric")


@gin.configurable(module="corrections")
def importance(log_ratio: Array, mask: Array, segment_ids: Array, level: str = "token") -> Array:
    """The ratio itself, unbiased at level "sequence"; the log-ratio of the level is clamped to ±20
    before exp."""
    one_of("importance.level", level, LEVELS)
    return _importance(log_ratio, mask, segment_ids, level)


@gin.configurable(module="corrections")
def truncated(
    log_ratio: Array, mask: Array, segment_ids: Array, cap: float = 2.0, level: str = "token"
) -> Array:
    """min(importance, cap). Raises ConfigError unless cap is positive.

    Source: truncated importance sampling, Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training".
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
    """importance where low ≤ ratio ≤ high, else 0; reweight=False gives 1 or 0. None is no bound.

    Raises ConfigError for low below 0, high not positive, or low beyond high. Source: IcePop (level
    "token", 0.5 to 5), arXiv 2510.18855; MIS is level "sequence"; AReaL, arXiv 2505.24298.
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
def second_moment(
    log_ratio: Array, mask: Array, segment_ids: Array, threshold: float = 0.04
) -> Array:
    """1 on the tokens that are kept, 0 on those of the largest d², which go until the mean d² of
    the rest is ≤ threshold.

    Tokens of equal d² stay or go together, and those of the smallest always stay. To be called with
    the whole optimizer batch. Raises ConfigError for a negative threshold. Source: M2PO, arXiv
    2510.01161.
    """
    at_least("second_moment.threshold", threshold, 0)
    xp = array_namespace(log_ratio)
    squares = arrays.masked(stop_gradient(log_ratio), mask) ** 2
    infinite = xp.full_like(squares, xp.inf)
    ordered = xp.sort(xp.reshape(xp.where(mask, squares, infinite), (-1,)))
    # A running sum over millions of float32 loses digits; jax has no float64 unless it is asked
    # for.
    sums = xp.cumulative_sum(ordered, dtype=None if is_jax_array(ordered) else xp.float64)
    # how many tokens have at most this d², its equals included
    up_to = xp.searchsorted(ordered, ordered, side="right")
    affordable = xp.take(sums, up_to - 1) <= threshold * xp.astype(up_to, sums.dtype)
    largest = xp.max(xp.where(affordable, ordered, xp.full_like(ordered, -xp.inf)))
    return arrays.masked(xp.ones_like(squares), mask & (squares <= xp.maximum(largest, ordered[0])))


def _importance(log_ratio: Array, mask: Array, segment_ids: Array, level: str) -> Array:
    own = arrays.masked(stop_gradient(log_ratio), mask)
    if level == "sequence":
        own = segment_sum(own, segment_ids)
    if level == "geometric":
        own = segment_mean(own, mask, segment_ids)
    return arrays.masked(array_namespace(own).exp(clamp(own)), mask)
