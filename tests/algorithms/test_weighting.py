"""Weights against loops written out, and the promise that packing cannot matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.algorithms.weighting import sequence_mean, token_mean


def rows_of(sequences: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences (lists of mask values) laid one after the other, greedily, into rows: mask and segment ids."""
    masks, ids = [[]], [[]]
    for sequence in sequences:
        if len(masks[-1]) + len(sequence) > length:
            masks.append([])
            ids.append([])
        segment = (ids[-1][-1] if ids[-1] else 0) + 1
        masks[-1] += sequence
        ids[-1] += [segment] * len(sequence)
    pad = [length - len(row) for row in masks]
    return (
        np.array([row + [0] * n for row, n in zip(masks, pad, strict=True)], bool),
        np.array([row + [0] * n for row, n in zip(ids, pad, strict=True)], np.int32),
    )


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=9)


@given(sequences)
def test_token_mean_gives_every_masked_token_the_same_share(sequences):
    mask, ids = rows_of(sequences, 8)
    weights = token_mean(mask, ids)
    total = sum(sum(s) for s in sequences)
    np.testing.assert_allclose(weights, mask / total if total else np.zeros(mask.shape))


@given(sequences)
def test_sequence_mean_gives_every_sequence_with_a_masked_token_the_same_share(sequences):
    mask, ids = rows_of(sequences, 8)
    weights = sequence_mean(mask, ids)
    counted = sum(any(s) for s in sequences)
    expected = np.zeros(mask.shape)
    for row, segment in {(r, i) for r, i in zip(*np.nonzero(ids), strict=True) for i in [ids[r, i]]}:
        own = (ids[row] == segment) & mask[row]
        if own.any():
            expected[row, own] = 1 / (counted * own.sum())
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


@settings(deadline=None)
@given(sequences, st.randoms(use_true_random=False))
@pytest.mark.parametrize("weighting", [token_mean, sequence_mean])
def test_a_weight_does_not_depend_on_packing_or_order(weighting, sequences, random):
    def weight_by_sequence(order, length):
        mask, ids = rows_of([sequences[i] for i in order], length)
        flat = weighting(mask, ids)[ids > 0]
        parts = np.split(flat, np.cumsum([len(sequences[i]) for i in order])[:-1])
        return dict(zip(order, parts, strict=True))

    order = list(range(len(sequences)))
    random.shuffle(order)
    one, other = weight_by_sequence(range(len(sequences)), 8), weight_by_sequence(order, 17)
    for i in one:
        np.testing.assert_allclose(one[i], other[i], rtol=1e-12)


def test_a_batch_without_a_masked_token_has_weights_of_zero():
    mask, ids = np.zeros((2, 4), bool), np.ones((2, 4), np.int32)
    for weighting in (token_mean, sequence_mean):
        assert (weighting(mask, ids) == 0).all()
