"""Weights that decide how terms are averaged: one weight a token, computed once on the host over
the whole optimizer batch.

The trainer minimises `sum(weights * terms)` and divides by nothing, so a result cannot depend on
how rows are packed, split into micro-batches or spread over devices. Arrays are `[rows, length]`; a
segment is identified by (row, id), and id 0 is padding.
"""

from __future__ import annotations

import gin
from array_api_compat import array_namespace, is_jax_array

from areal_x.algorithms.arrays import segment_sum
from areal_x.errors import positive
from areal_x.types import Array


@gin.configurable(module="weighting")
def token_mean(mask: Array, segment_ids: Array) -> Array:
    """Every token counts the same: 1 / N, with N masked tokens in the batch. Source: DAPO, arXiv
    2503.14476."""
    ones = _as_float(mask)
    return ones / _at_least_one(ones.sum())


@gin.configurable(module="weighting")
def sequence_mean(mask: Array, segment_ids: Array) -> Array:
    """Every sequence counts the same: 1 / (S · n_i), with S sequences that have masked tokens, n_i
    in sequence i.

    Source: GRPO, arXiv 2402.03300.
    """
    return _segment_mean(mask, segment_ids)


@gin.configurable(module="weighting")
def sequence_sum(mask: Array, segment_ids: Array) -> Array:
    """Terms are summed over a sequence and averaged over sequences: 1 / S. Source: RLOO, arXiv
    2402.14740."""
    return _as_float(mask) / _at_least_one(_segments(_share(mask, segment_ids)))


@gin.configurable(module="weighting")
def constant(mask: Array, segment_ids: Array, length: float) -> Array:
    """`sequence_sum` divided by one length for all: 1 / (S · length), so that a token of a long
    answer weighs no less.

    Source: Dr. GRPO, arXiv 2503.20783.

    Args:
        length: Longest possible completion in tokens; above 0.
    """
    positive("constant.length", length)
    return _as_float(mask) / (_at_least_one(_segments(_share(mask, segment_ids))) * length)


@gin.configurable(module="weighting")
def group_mean(mask: Array, segment_ids: Array, groups_of_segments: Array) -> Array:
    """Every group counts the same, and within it every token: 1 / (G · n_g), with G groups that
    have masked tokens, n_g in group g.

    Source: ScaleRL, arXiv 2510.13786 (prompt-level average).

    Args:
        groups_of_segments: `[rows, ids]`, at [row, id] the group of that segment as any integer;
            entries at id 0 are ignored.
    """
    xp = array_namespace(mask)
    row = xp.cumulative_sum(xp.ones_like(segment_ids[:, :1]), axis=0) - 1
    segment_of_token = xp.reshape(row * groups_of_segments.shape[1] + segment_ids, (-1,))
    groups = xp.take(xp.reshape(groups_of_segments, (-1,)), segment_of_token)
    # renumbered below the number of tokens, whatever integers identify the groups
    numbers = xp.searchsorted(xp.sort(groups), groups)
    # With all rows as one long row, a group is a segment.
    weights = _segment_mean(xp.reshape(mask, (1, -1)), xp.reshape(numbers, (1, -1)))
    return xp.reshape(weights, mask.shape)


@gin.configurable(module="weighting")
def pair_mean(mask: Array, segment_ids: Array) -> Array:
    """Every pair counts the same: 1 / (P · n_p), with P pairs that have masked tokens, n_p in both
    segments of pair p.

    A pair is two adjacent segments of a row, ids 2k - 1 (chosen) and 2k (rejected). A term with the
    same value on all masked tokens of its pair is averaged over pairs. Source: DPO, arXiv
    2305.18290, eq. 7.
    """
    return _segment_mean(mask, (segment_ids + 1) // 2)


def _segment_mean(mask: Array, segment_ids: Array) -> Array:
    """1 / (S · n_i) for segments of any kind: sequences, pairs, groups."""
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
    # Counts beyond 2^24 are inexact in float32; jax has no float64 unless it is enabled.
    return xp.astype(mask, xp.float32 if is_jax_array(mask) else xp.float64)


def _at_least_one(count: Array) -> Array:
    """1 in place of 0 as a divisor: weights of an empty batch or segment are 0, never NaN."""
    xp = array_namespace(count)
    return xp.where(count > 0, count, xp.ones_like(count))
