"""How terms are averaged: one weight for each token, computed once on the host over the whole optimizer batch.

The trainer minimises `sum(weights * terms)` and divides by nothing, so a result cannot depend on how rows are packed, split
into micro-batches or spread over devices. Arrays are `[rows, length]`; a segment is named by (row, id), id 0 is padding.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_jax_array

from areal_x.algorithms.arrays import segment_sum
from areal_x.types import Array


@gin.configurable(module="weighting")
def token_mean(mask: Array, segment_ids: Array) -> Array:
    """Every token counts the same: 1 / N, N the masked tokens of the batch. Source: DAPO, arXiv 2503.14476."""
    ones = _as_float(mask)
    return ones / _at_least_one(ones.sum())


@gin.configurable(module="weighting")
def sequence_mean(mask: Array, segment_ids: Array) -> Array:
    """Every sequence counts the same: 1 / (S · n_i), S the sequences with a masked token, n_i those of sequence i.

    Source: GRPO, arXiv 2402.03300.
    """
    ones = _as_float(mask)
    xp = array_namespace(ones)
    tokens_of_own = segment_sum(ones, segment_ids)
    share = ones / xp.where(tokens_of_own > 0, tokens_of_own, xp.ones_like(ones))
    # Each sequence with a masked token adds exactly 1 to the sum of shares, up to rounding: so the sum counts them.
    return share / _at_least_one(xp.round(share.sum()))


def _as_float(mask: Array) -> Array:
    xp = array_namespace(mask)
    # Counts beyond 2^24 are inexact in float32; jax has no float64 unless it is asked for.
    return xp.astype(mask, xp.float32 if is_jax_array(mask) else xp.float64)


def _at_least_one(count: Array) -> Array:
    """An empty batch has nothing to divide: its weights are 0, never NaN."""
    xp = array_namespace(count)
    return xp.where(count > 0, count, xp.ones_like(count))
