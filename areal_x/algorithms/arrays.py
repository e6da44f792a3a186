"""Array operations beyond the array-API standard that the algorithms need, for numpy, jax and
torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_jax_array, is_numpy_array, is_torch_array

from areal_x.types import Array

# exp(20) is 5e8: beyond it a ratio carries no information and its square overflows float32
LOG_RATIO_LIMIT = 20.0


def lift(x: Array) -> Array:
    """x in at least float32: bfloat16 is upcast, float64 is kept."""
    # result_type would do this in one call, but torch.compile breaks the graph at it
    xp = array_namespace(x)
    return x if x.dtype == xp.float64 else xp.astype(x, xp.float32)


def masked(x: Array, mask: Array) -> Array:
    """x where the mask is True, exactly 0 elsewhere, in at least float32.

    Inputs are masked before any arithmetic: masked-out entries may be NaN or infinite, and 0 * NaN
    is NaN, also in a gradient.
    """
    xp = array_namespace(x)
    x = lift(x)
    return xp.where(mask, x, xp.zeros_like(x))


def clamp(log_ratio: Array) -> Array:
    """A log-ratio, also a summed or averaged one, clamped to ±20, as every one is before exp."""
    xp = array_namespace(log_ratio)
    return xp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(logp: Array, anchor: Array, mask: Array) -> Array:
    """logp - anchor where masked, 0 elsewhere, clamped to ±20."""
    return clamp(masked(logp, mask) - masked(anchor, mask))


def importance_ratio(logp: Array, anchor: Array, mask: Array) -> Array:
    """exp(logp - anchor) where masked, 1 elsewhere; the log-ratio is clamped to ±20 before exp."""
    xp = array_namespace(logp)
    return xp.exp(log_ratio(logp, anchor, mask))


def stop_gradient(x: Array) -> Array:
    """x as a constant: no gradient flows through it."""
    if is_torch_array(x):
        return x.detach()
    if is_jax_array(x):
        from jax.lax import stop_gradient as jax_stop_gradient

        return jax_stop_gradient(x)
    return x


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), written with tanh so that no x overflows."""
    xp = array_namespace(x)
    return (1 + xp.tanh(x / 2)) / 2


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), exact for large x of either sign."""
    xp = array_namespace(x)
    return xp.logaddexp(x, xp.zeros_like(x))


def segment_sum(values: Array, segment_ids: Array) -> Array:
    """[R, L] → [R, L]: each token gets the sum of `values` over its own segment. A segment is
    identified by (row, id)."""
    xp = array_namespace(values)
    rows, length = values.shape
    keys = _segment_keys(segment_ids)
    flat, size = xp.reshape(values, (-1,)), rows * (length + 1)
    sums: Any
    if is_numpy_array(values):
        sums = np.bincount(keys, weights=flat, minlength=size).astype(values.dtype)
    elif is_torch_array(values):
        sums = values.new_zeros(size).index_add(0, keys, flat)
    else:
        sums = xp.zeros(size, dtype=values.dtype).at[keys].add(flat)
    return xp.reshape(xp.take(sums, keys), (rows, length))


def segment_mean(values: Array, mask: Array, segment_ids: Array) -> Array:
    """[R, L] → [R, L]: each token gets the mean of `values` over the masked tokens of its own
    segment, 0 if there are none."""
    xp = array_namespace(values)
    values = masked(values, mask)
    count = segment_sum(xp.astype(mask, values.dtype), segment_ids)
    return segment_sum(values, segment_ids) / xp.where(count > 0, count, xp.ones_like(count))


def _segment_keys(segment_ids: Array) -> Array:
    """[R, L] → [R·L]: a unique number for each (row, segment id), below R·(L+1)."""
    xp = array_namespace(segment_ids)
    row = xp.cumulative_sum(xp.ones_like(segment_ids[:, :1]), axis=0) - 1
    return xp.reshape(row * (segment_ids.shape[1] + 1) + segment_ids, (-1,))
