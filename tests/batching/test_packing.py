"""Packing: every token at exactly one position, whole sequences, few rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.batching.packing import first_fit_decreasing, pack
from areal_x.errors import UserError
from areal_x.types import Images, Kept, Trajectory
from tests.kept import kept_with

ROW = 24
lengths_in_rows = st.lists(st.integers(1, ROW), min_size=1, max_size=60)


def trajectory(length: int, number: int = 0) -> Trajectory:
    """A trajectory whose tokens are all different, also from those of other trajectories."""
    tokens = np.arange(length, dtype=np.int32) + 1000 * (number + 1)
    return Trajectory(
        tokens=tokens,
        mask=tokens % 3 > 0,
        logprobs=(-tokens / 7).astype(np.float32),
        versions=(tokens % 5).astype(np.int32),
    )


def trajectories(lengths: list[int]) -> list[Trajectory]:
    return [trajectory(length, number) for number, length in enumerate(lengths)]


def one_by_one(lengths: list[int], row_length: int) -> list[list[int]]:
    """Textbook first-fit decreasing: the lengths in each row."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for row in rows:
            if sum(row) + length <= row_length:
                row.append(length)
                break
        else:
            rows.append([length])
    return rows


@settings(max_examples=200, deadline=None)
@given(lengths_in_rows)
def test_each_token_lies_in_one_place_and_sequences_stay_whole(lengths: list[int]) -> None:
    given_ = trajectories(lengths)
    packed = pack(given_, ROW)
    batch = packed.batch
    assert int((batch.segment_ids > 0).sum()) == sum(lengths)
    for i, t in enumerate(given_):
        row = packed.places.rows[i]
        own = batch.segment_ids[row] == packed.places.segments[i]
        assert np.flatnonzero(own).tolist() == list(range(packed.places.starts[i], packed.places.starts[i] + lengths[i]))
        assert batch.positions[row][own].tolist() == list(range(lengths[i]))
        for name, array in (("tokens", t.tokens), ("mask", t.mask), ("behavior_logp", t.logprobs), ("versions", t.versions)):
            np.testing.assert_array_equal(getattr(batch, name)[row][own], array)


@settings(max_examples=100, deadline=None)
@given(lengths_in_rows)
def test_segments_of_a_row_count_from_1_and_padding_is_behind_them(lengths: list[int]) -> None:
    batch = pack(trajectories(lengths), ROW).batch
    for row in batch.segment_ids:
        used = row[row > 0]
        assert (row[: len(used)] > 0).all()
        assert (np.diff(used, prepend=0) >= 0).all()
        assert (np.diff(used, prepend=0) <= 1).all()
    padding = batch.segment_ids == 0
    assert not batch.mask[padding].any()
    assert not batch.tokens[padding].any()
    assert not batch.behavior_logp[padding].any()
    assert (batch.versions[padding] == -1).all()


@settings(max_examples=200, deadline=None)
@given(lengths_in_rows)
def test_rows_are_those_of_first_fit_decreasing(lengths: list[int]) -> None:
    rows, _, segments = first_fit_decreasing(np.array(lengths, np.int32), ROW)
    expected = one_by_one(lengths, ROW)
    for r, row in enumerate(expected):
        inside = np.flatnonzero(rows == r)
        assert [lengths[i] for i in sorted(inside, key=lambda i: segments[i])] == row
    assert rows.max() + 1 == len(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, ROW), min_size=1, max_size=6), min_size=1, max_size=12))
def test_at_most_two_ninths_more_rows_than_needed(cuts: list[list[int]]) -> None:
    # Full rows cut into pieces, so that the minimum number of rows is known.
    lengths = []
    for shares in cuts:
        edges = np.round(np.cumsum([0, *shares]) / sum(shares) * ROW).astype(int)
        lengths += [int(n) for n in np.diff(edges) if n > 0]
    assert sum(lengths) == ROW * len(cuts)
    assert pack(trajectories(lengths), ROW).batch.shape[0] <= 11 / 9 * len(cuts) + 6 / 9


@settings(max_examples=100, deadline=None)
@given(lengths_in_rows, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_places_only(lengths: list[int], random: object) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    shapes = []
    for order in (lengths, shuffled):
        rows, _, _ = first_fit_decreasing(np.array(order, np.int32), ROW)
        shapes.append(Counter(tuple(sorted(np.array(order)[rows == r])) for r in range(rows.max() + 1)))
    assert shapes[0] == shapes[1]


@settings(max_examples=100, deadline=None)
@given(lengths_in_rows)
def test_gather_undoes_spread(lengths: list[int]) -> None:
    packed = pack(trajectories(lengths), ROW)
    values = [np.random.default_rng(i).normal(size=n).astype(np.float32) for i, n in enumerate(lengths)]
    spread = packed.spread_tokens(values)
    assert (spread[packed.batch.segment_ids == 0] == 0).all()
    for got, wanted in zip(packed.gather(spread), values, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for i, got in enumerate(packed.gather(packed.spread(np.arange(len(lengths)) + 1.0))):
        assert got.tolist() == [i + 1.0] * lengths[i]
    for t, got in zip(trajectories(lengths), packed.gather(packed.batch.tokens), strict=True):
        np.testing.assert_array_equal(got, t.tokens)


def test_random_sequences_fill_the_rows() -> None:
    lengths = np.random.default_rng(0).integers(16, 700, 4096).astype(np.int32)
    rows, _, _ = first_fit_decreasing(lengths, 1024)
    assert rows.max() + 1 <= 1.01 * lengths.sum() / 1024 + 1


def test_empty_rows_fill_up_to_the_multiple() -> None:
    batch = pack(trajectories([20, 20, 20]), ROW, rows_multiple=4).batch
    assert batch.shape == (4, ROW)
    assert not batch.segment_ids[3].any()
    assert pack([], ROW, rows_multiple=2).batch.shape == (2, ROW)


def test_a_sequence_longer_than_a_row_names_the_binding_to_raise() -> None:
    with pytest.raises(UserError, match=r"25 tokens .* row of 24.*raise train\.row_length to at least 25"):
        pack(trajectories([3, 25]), ROW)


def test_values_that_do_not_match_the_tokens_are_refused() -> None:
    packed = pack(trajectories([3, 2]), ROW)
    with pytest.raises(ValueError, match="one value for each token"):
        packed.spread_tokens([np.zeros(2, np.float32), np.zeros(3, np.float32)])


def test_recorded_experts_lie_where_their_tokens_do_and_those_of_others_are_not_recorded() -> None:
    made = trajectories([5, 3, 4])
    experts = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2)
    packed = pack([replace(made[0], experts=experts), *made[1:]], 8)
    assert packed.batch.experts.shape == (*packed.batch.shape, 2, 2)
    row, start = packed.places.rows[0], packed.places.starts[0]
    np.testing.assert_array_equal(packed.batch.experts[row, start : start + 5], experts)
    elsewhere = np.ones(packed.batch.shape, bool)
    elsewhere[row, start : start + 5] = False
    assert (packed.batch.experts[elsewhere] == -1).all()
    assert pack(made, 8).batch.experts is None
    other = replace(made[1], experts=np.zeros((3, 1, 2), np.int16))
    with pytest.raises(ValueError, match="different models"):
        pack([replace(made[0], experts=experts), other], 8)


def choosing(whole: Trajectory, seed: int) -> Trajectory:
    """A trajectory of which two thirds of the tokens were sampled from some alone."""
    return replace(whole, kept=kept_with(whole.tokens, 900, seed))


@settings(max_examples=100, deadline=None)
@given(lengths_in_rows, st.booleans())
def test_kept_tokens_are_paired_with_where_their_token_lies(lengths: list[int], shared: bool) -> None:
    made = [choosing(t, i) if i % 3 else t for i, t in enumerate(trajectories(lengths))]
    packed = pack(made, ROW, rows_multiple=3, groups=[0] * len(made) if shared else None)
    if all(t.kept is None for t in made):
        assert packed.batch.kept is None
        return
    rows, most, _ = packed.batch.kept.shape
    assert rows == packed.batch.shape[0]
    assert most & (most - 1) == 0
    assert packed.batch.kept.min() >= -1
    found = {(row, *pair) for row in range(rows) for pair in packed.batch.kept[row].tolist() if pair != [-1, -1]}
    expected = set()
    for i, t in enumerate(made):
        if t.kept is not None:
            within = np.repeat(np.arange(len(t)), t.kept.counts) + packed.places.starts[i]
            expected |= {(int(packed.places.rows[i]), *pair) for pair in zip(within.tolist(), t.kept.ids.tolist(), strict=True)}
    assert found == expected


def test_a_sampled_token_that_was_not_kept_is_refused() -> None:
    made = choosing(trajectory(8), 0)
    with pytest.raises(ValueError, match="not among those that its sampling kept"):
        replace(made, tokens=made.tokens + 900 * (np.arange(8) == 4))
    replace(made, tokens=made.tokens + (np.arange(8) == 3))  # sampled from everything
    with pytest.raises(ValueError, match="one length"):
        replace(made, kept=Kept.everything(7))
    with pytest.raises(ValueError, match="3 kept ids came with counts of 2"):
        Kept(np.array([1, 1], np.int32), np.arange(3, dtype=np.int32))


def seeing(length: int, number: int, *grids: tuple[int, int, int]) -> Trajectory:
    """A trajectory with images whose patches are all different, also from those of others."""
    count = sum(int(np.prod(grid)) for grid in grids)
    patches = np.arange(count * 2, dtype=np.float32).reshape(count, 2) + 1000 * (number + 1)
    return replace(trajectory(length, number), images=Images(patches, np.array(grids, np.int32).reshape(-1, 3)))


def test_images_lie_in_the_order_of_their_tokens_and_say_whose_they_are() -> None:
    made = [
        seeing(8, 0, (1, 2, 2)),
        trajectory(5, 1),
        seeing(10, 2, (1, 2, 4), (2, 2, 2)),
        seeing(20, 3, (1, 4, 2)),
        seeing(3, 4),
    ]
    packed = pack(made, ROW)
    batch = packed.batch
    assert list(zip(packed.places.rows, packed.places.segments, strict=True)) == [(1, 2), (1, 3), (1, 1), (0, 1), (0, 2)]
    assert batch.grids.tolist() == [[[1, 4, 2], [0] * 3, [0] * 3], [[1, 2, 4], [2, 2, 2], [1, 2, 2]]]
    assert batch.image_segments.tolist() == [[1, 0, 0], [1, 1, 2]]
    assert (batch.patches.shape, batch.patches.dtype) == ((2, 20, 2), np.float32)
    np.testing.assert_array_equal(batch.patches[1], np.concatenate([made[2].images.patches, made[0].images.patches]))
    np.testing.assert_array_equal(batch.patches[0, :8], made[3].images.patches)
    assert not batch.patches[0, 8:].any()


def test_rows_without_images_say_nothing_of_them() -> None:
    batch = pack([trajectory(5), seeing(3, 1)], ROW).batch
    assert not batch.has_images
    assert batch.patches is batch.grids is batch.image_segments is None


def test_patches_of_two_processors_do_not_share_a_batch() -> None:
    other = replace(trajectory(4), images=Images(np.zeros((4, 3), np.float32), np.array([[1, 2, 2]], np.int32)))
    with pytest.raises(UserError, match=r"patches of \[2, 3\] features"):
        pack([seeing(4, 1, (1, 2, 2)), other], ROW)
