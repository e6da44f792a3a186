"""Weights against explicit loops, and their independence of packing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.algorithms.weighting import constant, group_mean, pair_mean, sequence_mean, sequence_sum, token_mean
from areal_x.errors import ConfigError
from tests.algorithms.agreement import agree


def rows_of(sequences: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Mask and segment ids of sequences (lists of mask values) packed greedily into rows in their order."""
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


@given(sequences)
def test_sequence_sum_gives_every_token_one_over_the_sequences_with_a_masked_token(sequences):
    mask, ids = rows_of(sequences, 8)
    counted = sum(any(s) for s in sequences)
    np.testing.assert_allclose(sequence_sum(mask, ids), mask / counted if counted else np.zeros(mask.shape), rtol=1e-12)


@given(sequences, st.sampled_from([1, 7, 512, 0.5]))
def test_constant_is_sequence_sum_over_one_length_for_all(sequences, length):
    mask, ids = rows_of(sequences, 8)
    counted = sum(any(s) for s in sequences)
    expected = mask / (counted * length) if counted else np.zeros(mask.shape)
    np.testing.assert_allclose(constant(mask, ids, length), expected, rtol=1e-12)


@pytest.mark.parametrize("length", [0, -3, float("nan")])
def test_a_length_that_is_not_positive_is_refused_by_name(length):
    with pytest.raises(ConfigError, match=r"constant\.length"):
        constant(np.ones((1, 2), bool), np.ones((1, 2), np.int32), length)


names_of_groups = st.lists(st.sampled_from([-7, 0, 1, 2**31 - 1, -(2**31)]), min_size=9, max_size=9)


def with_groups(sequences, names, length):
    """mask, ids, and at [row, id] the group of that segment; entries at id 0 and past the last id belong to no segment."""
    mask, ids = rows_of(sequences, length)
    groups, left = np.full((len(ids), ids.max() + 2), 12345), iter(names)
    for row, own in enumerate(ids):
        for segment in range(1, own.max() + 1):
            groups[row, segment] = next(left)
    return mask, ids, groups


@given(sequences, names_of_groups)
def test_group_mean_gives_every_group_with_a_masked_token_the_same_share_and_every_token_of_it_too(sequences, names):
    mask, ids, groups = with_groups(sequences, names, 8)
    tokens = {}
    for sequence, name in zip(sequences, names, strict=False):
        tokens[name] = tokens.get(name, 0) + sum(sequence)
    counted = sum(n > 0 for n in tokens.values())
    weights = group_mean(mask, ids, groups)
    for at in np.ndindex(mask.shape):
        expected = 1 / (counted * tokens[groups[at[0], ids[at]]]) if mask[at] else 0.0
        assert weights[at] == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.tuples(*[st.lists(st.integers(0, 1), min_size=1, max_size=4)] * 2), min_size=1, max_size=6))
def test_a_term_that_is_one_number_on_all_of_a_pair_is_averaged_over_the_pairs_by_pair_mean(pairs):
    mask, pair_ids = rows_of([chosen + rejected for chosen, rejected in pairs], 8)
    ids, terms, values, left = np.zeros_like(pair_ids), np.zeros(mask.shape), [], list(pairs)
    for row, own in enumerate(pair_ids):
        for k in range(1, own.max() + 1):
            chosen, rejected = left.pop(0)
            ids[row, own == k] = [2 * k - 1] * len(chosen) + [2 * k] * len(rejected)
            terms[row, own == k] = len(left) + 0.5
            if any(chosen + rejected):
                values.append(len(left) + 0.5)
    weights = pair_mean(mask, ids)
    assert (weights[~mask] == 0).all()
    assert (weights * terms).sum() == pytest.approx(sum(values) / len(values) if values else 0.0)
    for row, own in enumerate(pair_ids):
        for k in range(1, own.max() + 1):
            assert len(set(weights[row, (own == k) & mask[row]])) <= 1


@settings(max_examples=25)
@given(sequences, st.randoms(use_true_random=False))
@pytest.mark.parametrize("weighting", [token_mean, sequence_mean, sequence_sum, partial(constant, length=9)])
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


@given(sequences, names_of_groups, st.randoms(use_true_random=False))
def test_group_mean_does_not_depend_on_packing_or_order(sequences, names, random):
    def weight_by_sequence(order, length):
        mask, ids, groups = with_groups([sequences[i] for i in order], [names[i] for i in order], length)
        parts = np.split(group_mean(mask, ids, groups)[ids > 0], np.cumsum([len(sequences[i]) for i in order])[:-1])
        return dict(zip(order, parts, strict=True))

    order = list(range(len(sequences)))
    random.shuffle(order)
    one, other = weight_by_sequence(range(len(sequences)), 8), weight_by_sequence(order, 17)
    for i in one:
        np.testing.assert_allclose(one[i], other[i], rtol=1e-12)


WEIGHTINGS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": partial(constant, length=9),
    "group_mean": group_mean,
    "pair_mean": pair_mean,
}
on_every_weighting = pytest.mark.parametrize("name", WEIGHTINGS)


@on_every_weighting
def test_a_batch_without_a_masked_token_has_weights_of_zero(name):
    mask, ids = np.zeros((2, 4), bool), np.ones((2, 4), np.int32)
    groups = [np.zeros((2, 3), np.int32)] if name == "group_mean" else []
    assert (WEIGHTINGS[name](mask, ids, *groups) == 0).all()


@on_every_weighting
def test_numpy_jax_and_torch_agree(name):
    mask, ids, groups = with_groups([[0, 1, 1], [1], [0, 0], [1, 1, 1, 1], [0, 1], [1, 0, 1, 1, 0]], [5, -3, 8, 5, 9, -3], 8)
    inputs = [groups.astype(np.int32)] if name == "group_mean" else []
    # group_mean and pair_mean hold sequence_mean, and constant sequence_sum.
    agree(WEIGHTINGS[name], mask, ids, *inputs, torch_compiled=not name.startswith("sequence"))
