"""How terms are averaged: one weight for each token, computed once on the host over the whole
optimizer batch.

The trainer minimises `sum(weights * terms)` and divides by nothing, so a result cannot depend on
how rows are packed, split into micro-batches or spread over devices. Arrays are `[rows, length]`; a
segment is named by (row, id), id 0 is padding.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_jax_array

from areal_x.algorithms.arrays import segment_sum
from areal_x.errors import positive
from areal_x.types import Array


@gin.configurable(module="weighting")
def token_mean(mask: Array, segment_ids: Array) -> Array:
    """Every token counts the same: 1 / N, N the masked tokens of the batch. Source: DAPO, arXiv
    2503.14476."""
    ones = _as_float(mask)
    return ones / _at_least_one(ones.sum())


@gin.configurable(module="weighting")
def sequence_mean(mask: Array, segment_ids: Array) -> Array:
    """Every sequence counts the same: 1 / (S · n_i), S the sequences with a masked token, n_i those
    of sequence i.

    Source: GRPO, arXiv 2402.03300.
    """
    return _segment_mean(mask, segment_ids)


@gin.configurable(module="weighting")
def sequence_sum(mask: Array, segment_ids: Array) -> Array:
    """The terms of a sequence are added up, and sequences averaged: 1 / S. Source: RLOO, arXiv
    2402.14740."""
    return _as_float(mask) / _at_least_one(_segments(_share(mask, segment_ids)))


@gin.configurable(module="weighting")
def constant(mask: Array, segment_ids: Array, length: float) -> Array:
    """As `sequence_sum`, divided by one length for all: 1 / (S · length), so that a long answer is
    no cheaper for each token.

    length: the most tokens that a sequence may generate. Raises ConfigError unless it is positive.
    Source: Dr. GRPO, arXiv 2503.20783.
    """
    positive("constant.length", length)
    return _as_float(mask) / (_at_least_one(_segments(_share(mask, segment_ids))) * length)


@gin.configurable(module="weighting")
def group_mean(mask: Array, segment_ids: Array, groups_of_segments: Array) -> Array:
    """Every group counts the same, and within it every token: 1 / (G · n_g), G the groups with a
    masked token, n_g those of g.

    groups_of_segments: `[rows, ids]`, at [row, id] the group of that segment, any integer; what
    stands at id 0 is not used. Source: ScaleRL, arXiv 2510.13786 (prompt-level average).
    """
    xp = array_namespace(mask)
    row = xp.cumulative_sum(xp.ones_like(segment_ids[:, :1]), axis=0) - 1
    of_token = xp.reshape(row * groups_of_segments.shape[1] + segment_ids, (-1,))
    groups = xp.take(xp.reshape(groups_of_segments, (-1,)), of_token)
    # below the number of tokens, whatever integers name the groups
    numbers = xp.searchsorted(xp.sort(groups), groups)
    # Seen as one long row, a group is a segment.
    weights = _segment_mean(xp.reshape(mask, (1, -1)), xp.reshape(numbers, (1, -1)))
    return xp.reshape(weights, mask.shape)


@gin.configurable(module="weighting")
def pair_mean(mask: Array, segment_ids: Array) -> Array:
    """Every pair counts the same: 1 / (P · n_p), P the pairs with a masked token, n_p the masked
    tokens of both its segments.

    A pair is two neighbouring segments of a row, ids 2k - 1 (chosen) and 2k (rejected). A term that
    is one number on all masked tokens of its pair is averaged over pairs. Source: DPO, arXiv
    2305.18290, eq. 7.
    """
    return _segment_mean(mask, (segment_ids + 1) // 2)


def _segment_mean(mask: Array, segment_ids: Array) -> Array:
    """1 / (S · n_i) for any segments: sequences, pairs, groups."""
    share = _share(mask, segment_ids)
    return share / _at_least_one(_segments(share))


def _share(mask: Array, segment_ids: Array) -> Array:
    """1 / n_i on the masked tokens of segment i."""
    ones = _as_float(mask)
    return ones / _at_least_one(segment_sum(ones, segment_ids))


def _segments(share: Array) -> Array:
    """S: each segment with a masked token adds exactly 1 to the sum of shares, up to rounding."""
    return array_namespace(share).round(share.sum())


def _as_float(mask: Array) -> Array:
    xp = array_namespace(mask)
    # Counts beyond 2^24 are inexact in float32; jax has no float64 unless it is asked for.
    return xp.astype(mask, xp.float32 if is_jax_array(mask) else xp.float64)


def _at_least_one(count: Array) -> Array:
    """Where nothing is counted there is nothing to divide: weights are 0, never NaN."""
    xp = array_namespace(count)
    return xp.where(count > 0, count, xp.ones_like(count))
