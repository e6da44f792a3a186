"""Prompt sharing: no trained token is lost or duplicated, and every token can be gathered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.batching.packing import Packed, pack
from areal_x.batching.sharing import MIN_SHARED_TOKENS, find_prefix_sets
from areal_x.types import Images, Trajectory

ROW = 96


def member(prompt: np.ndarray, answer: int, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, answer).astype(np.int32)
    return Trajectory.from_completion(prompt.astype(np.int32), tokens, -rng.random(answer), rng.integers(0, 9, answer))


def group(prompt: int, answers: list[int], number: int = 0) -> list[Trajectory]:
    """Members with the same prompt, which repeats one token."""
    return [member(np.full(prompt, 100 + number), answer, i + 1000 * number) for i, answer in enumerate(answers)]


# A prompt and the lengths of its answers; longer contexts than MIN_SHARED_TOKENS and shorter ones.
groups_in_rows = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 36), min_size=1, max_size=9)), max_size=7)


def packed_of(made: list[tuple[int, list[int]]], row_length: int = ROW) -> tuple[list[Trajectory], list[int], Packed]:
    members = [group(prompt, answers, number) for number, (prompt, answers) in enumerate(made)]
    trajectories, owners = [t for own in members for t in own], [n for n, own in enumerate(members) for _ in own]
    return trajectories, owners, pack(trajectories, row_length, groups=owners)


@settings(max_examples=150)
@given(groups_in_rows)
def test_every_token_is_found_and_each_trained_one_lies_once(made: list[tuple[int, list[int]]]) -> None:
    trajectories, _, packed = packed_of(made)
    batch = packed.batch
    fields = {"tokens": "tokens", "mask": "mask", "behavior_logp": "logprobs", "versions": "versions"}
    for name, of_trajectory in fields.items():
        for trajectory, found in zip(trajectories, packed.gather(getattr(batch, name)), strict=True):
            np.testing.assert_array_equal(found, getattr(trajectory, of_trajectory))
    for trajectory, positions in zip(trajectories, packed.gather(batch.positions), strict=True):
        assert positions.tolist() == list(range(len(trajectory)))
    assert batch.mask.sum() == sum(t.mask.sum() for t in trajectories)
    saved = sum(len(t) for t in trajectories) - np.count_nonzero(batch.segment_ids)
    lie = zip(packed.places.rows.tolist(), packed.places.shared_starts.tolist(), packed.places.shared.tolist(), strict=True)
    assert saved == packed.places.shared.sum() - sum(shared for _, _, shared in set(lie))
    assert not batch.prefix_ids[batch.segment_ids == 0].any()


@settings(max_examples=100)
@given(groups_in_rows)
def test_a_token_attends_to_what_comes_before_it_in_its_trajectory(made: list[tuple[int, list[int]]]) -> None:
    trajectories, _, packed = packed_of(made)
    batch = packed.batch
    for i, trajectory in enumerate(trajectories):
        row, first = packed.places.rows[i], packed.places.starts[i]
        prefix, own = batch.prefix_ids[row, first], batch.segment_ids[row, first]
        seen = [j for j in range(first + 1) if batch.segment_ids[row, j] in {prefix, own} - {0}]
        assert batch.tokens[row, seen].tolist() == trajectory.tokens[: packed.places.shared[i] + 1].tolist()
        assert not batch.prefix_ids[row, batch.segment_ids[row] == prefix].any() or prefix == 0
        here = batch.segment_ids[row] == own
        assert here.sum() == len(trajectory) - packed.places.shared[i]
        assert (batch.prefix_ids[row, here] == prefix).all()
        # The first trained token has its predecessor in its own segment, and a shared one is not trained on.
        assert not trajectory.mask[: packed.places.shared[i] + 1].any()


@settings(max_examples=100)
@given(groups_in_rows)
def test_gather_is_the_inverse_of_spread_tokens(made: list[tuple[int, list[int]]]) -> None:
    trajectories, _, packed = packed_of(made)
    values = [np.where(t.mask, np.random.default_rng(i).random(len(t)), 7.0) for i, t in enumerate(trajectories)]
    for value, found in zip(values, packed.gather(packed.spread_tokens(values)), strict=True):
        np.testing.assert_array_equal(found, value.astype(np.float32))
    spread = packed.spread(np.arange(1.0, len(trajectories) + 1))
    for i, (trajectory, found) in enumerate(zip(trajectories, packed.gather(spread), strict=True)):
        assert (found[packed.places.shared[i] :] == i + 1).all()
        assert (found[trajectory.mask] == i + 1).all()
    assert np.count_nonzero(spread) == sum(map(len, trajectories)) - packed.places.shared.sum()


@settings(max_examples=100)
@given(groups_in_rows)
def test_sharing_never_needs_more_rows(made: list[tuple[int, list[int]]]) -> None:
    trajectories, _, packed = packed_of(made)
    assert packed.batch.shape[0] <= pack(trajectories, ROW).batch.shape[0]


def test_a_group_lies_beside_one_copy_of_its_prompt() -> None:
    _, _, packed = packed_of([(40, [10, 12, 9])])
    (row,) = packed.batch.segment_ids
    assert np.bincount(row).tolist() == [ROW - 73, 39, 11, 13, 10]
    assert packed.batch.prefix_ids[0, :40].tolist() == [0] * 39 + [1]
    assert packed.batch.positions[0, 38:42].tolist() == [38, 39, 40, 41]
    assert packed.places.segments.tolist() == [2, 3, 4]


def test_a_group_too_large_for_a_row_is_cut_and_each_part_has_a_copy() -> None:
    _, _, packed = packed_of([(40, [20] * 4)])
    assert packed.batch.shape[0] == 2
    assert packed.places.shared.tolist() == [39] * 4
    assert sorted(packed.places.rows.tolist()) == [0, 0, 1, 1]
    assert np.count_nonzero(packed.batch.segment_ids) == 2 * 39 + 4 * 21


def test_a_member_left_alone_has_nothing_to_share() -> None:
    _, _, packed = packed_of([(60, [20, 20])])
    assert packed.places.shared.tolist() == [0, 0]


def test_short_prompts_are_not_shared() -> None:
    assert packed_of([(MIN_SHARED_TOKENS, [5, 5])])[2].places.shared.tolist() == [0, 0]
    assert packed_of([(MIN_SHARED_TOKENS + 1, [5, 5])])[2].places.shared.tolist() == [MIN_SHARED_TOKENS] * 2


def test_members_of_different_groups_share_nothing() -> None:
    made = group(30, [5, 5])
    assert pack(made, ROW, groups=[0, 1]).places.shared.tolist() == [0, 0]


def test_only_context_is_shared() -> None:
    prompt, same = np.arange(30), np.zeros(10, np.int32)
    made = [Trajectory.from_completion(prompt, same, same.astype(np.float32), same) for _ in range(2)]
    assert pack(made, ROW, groups=[0, 0]).places.shared.tolist() == [29, 29]


def test_images_are_not_shared() -> None:
    images = Images(np.zeros((4, 6), np.float32), np.array([[1, 2, 2]], np.int32))
    made = [replace(t, images=images) for t in group(30, [5, 5])] + group(30, [5, 5])
    assert pack(made, ROW, groups=[0] * 4).places.shared.tolist() == [0, 0, 29, 29]


def test_where_contexts_part_the_branches_share_if_that_saves_more() -> None:
    trunk = np.arange(20)
    longer = [member(np.concatenate([trunk, np.full(30, 60 + i)]), 5, i) for i in (1, 1, 2, 2)]
    shares = {tuple(one.members): one.shared for one in find_prefix_sets(longer, [0] * 4)}
    assert shares == {(0, 1): 49, (2, 3): 49}
    shorter = [member(np.concatenate([trunk, np.full(3, 60 + i)]), 5, i) for i in range(4)]
    assert {tuple(one.members): one.shared for one in find_prefix_sets(shorter, [0] * 4)} == {(0, 1, 2, 3): 19}


def test_a_context_that_ends_where_others_go_on_is_shared_with_them() -> None:
    trunk = np.arange(40)
    made = [member(trunk, 5, 0), member(np.append(trunk, [60, 61]), 5, 1), member(np.append(trunk, [62]), 5, 2)]
    assert [(one.members.tolist(), one.shared) for one in find_prefix_sets(made, [0] * 3)] == [([0, 1, 2], 39)]


def test_without_groups_nothing_is_said_of_sharing() -> None:
    assert pack(group(30, [5, 5]), ROW).batch.prefix_ids is None
    assert not pack(group(3, [5, 5]), ROW, groups=[0, 0]).batch.prefix_ids.any()


def test_pairs_cannot_share() -> None:
    with pytest.raises(ValueError, match="stay together"):
        pack(group(30, [5, 5]), ROW, together=2, groups=[0, 0])
