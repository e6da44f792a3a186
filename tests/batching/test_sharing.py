"""Sharing of tokens: none that is trained is lost or trained twice, and every sequence is in the rows from its first token to
its last."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.packing import Packed, pack
from areal_x.batching.sharing import MIN_SHARED_TOKENS, divided, tries_of
from areal_x.types import Episode, Group, Images, Kept, Scored, Task, Trajectory

ROW = 96


def member(prompt: np.ndarray, answer: int, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, answer).astype(np.int32)
    return Trajectory.from_completion(prompt.astype(np.int32), tokens, -rng.random(answer), rng.integers(0, 9, answer))


def group(prompt: int, answers: list[int], number: int = 0) -> list[Trajectory]:
    """Members with the same prompt, which repeats one token."""
    return [member(np.full(prompt, 100 + number), answer, i + 1000 * number) for i, answer in enumerate(answers)]


def turns_of(prompt: np.ndarray, lengths: list[tuple[int, int]], seed: int) -> list[Trajectory]:
    """The calls of an agent, each with its whole history as context. lengths: of each call's answer, and of what it is told."""
    rng, context, made = np.random.default_rng(seed), prompt, []
    for answer, told in lengths:
        made.append(member(context, answer, int(rng.integers(1 << 30))))
        context = np.concatenate([made[-1].tokens, rng.integers(0, 50, told)])
    return made


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Trajectory], list[int]]:
    """Trajectories made of a few pieces, so that they begin alike, part and go on from one another, in groups; of some, tokens
    are trained that others of the group train too, and of some none."""
    pieces = [np.full(draw(st.integers(1, 40)), token) for token in range(3)]
    trajectories, groups = [], []
    for _ in range(draw(st.integers(0, 14))):
        chosen = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        tokens = np.concatenate([pieces[i] for i in chosen])[:ROW].astype(np.int32)
        mask = np.arange(len(tokens)) >= draw(st.integers(0, len(tokens)))
        mask &= np.arange(len(tokens)) % draw(st.integers(1, 3)) == 0
        seed = np.random.default_rng(len(trajectories))
        logprobs = np.where(mask, -seed.random(len(tokens)), 0).astype(np.float32)
        trajectories.append(Trajectory(tokens, mask, logprobs, np.where(mask, 1, -1).astype(np.int32)))
        groups.append(draw(st.integers(0, 1)))
    return trajectories, groups


def walked(packed: Packed, row: int, column: int) -> list[int]:
    """The columns of a token's sequence up to itself, by its parents."""
    found = [column]
    while (column := int(packed.batch.parents[row, column])) >= 0:
        found.append(column)
    return found[::-1]


def columns_of(packed: Packed) -> list[np.ndarray]:
    return np.split(packed.places.columns, np.cumsum(packed.lengths)[:-1]) if len(packed.lengths) else []


@settings(max_examples=80)
@given(batches())
def test_every_sequence_is_recovered_and_each_trained_token_is_there_once(made: tuple[list[Trajectory], list[int]]) -> None:
    trajectories, groups = made
    packed = pack(trajectories, ROW, groups=groups)
    batch = packed.batch
    for trajectory, columns, row in zip(trajectories, columns_of(packed), packed.places.rows, strict=True):
        path = walked(packed, row, columns[-1])
        assert path == columns.tolist()
        assert batch.tokens[row, path].tolist() == trajectory.tokens.tolist()
        assert batch.positions[row, path].tolist() == list(range(len(trajectory)))
        assert (batch.segment_ids[row, path] > 0).all()
    trained = [
        (int(row), column)
        for trajectory, columns, row in zip(trajectories, columns_of(packed), packed.places.rows, strict=True)
        for column in columns[trajectory.mask].tolist()
    ]
    assert len(set(trained)) == len(trained) == batch.mask.sum()
    for name, of_trajectory in {"mask": "mask", "behavior_logp": "logprobs", "versions": "versions"}.items():
        for trajectory, found in zip(trajectories, packed.gather(getattr(batch, name)), strict=True):
            np.testing.assert_array_equal(found[trajectory.mask], getattr(trajectory, of_trajectory)[trajectory.mask])
    for i, found in enumerate(packed.gather(batch.segment_ids)):
        assert (found[trajectories[i].mask] == packed.places.segments[i]).all()


@settings(max_examples=60)
@given(batches())
def test_rows_are_tries_in_preorder_of_one_group_each(made: tuple[list[Trajectory], list[int]]) -> None:
    trajectories, groups = made
    packed = pack(trajectories, ROW, groups=groups)
    holders: dict[tuple[int, int], set[int]] = {}
    for group_, columns, row in zip(groups, columns_of(packed), packed.places.rows, strict=True):
        for column in columns.tolist():
            holders.setdefault((int(row), column), set()).add(group_)
    assert all(len(of_groups) == 1 for of_groups in holders.values())
    for row, (parents, ids) in enumerate(zip(packed.batch.parents, packed.batch.segment_ids, strict=True)):
        filled = np.count_nonzero(ids)
        assert (ids[:filled] > 0).all()
        assert (parents[filled:] == -1).all()
        assert {(row, column) for column in range(filled)} == {at for at in holders if at[0] == row}
        for before, column in pairwise(range(filled)):  # a token continues one of the last token's sequence, or none
            assert parents[column] in {-1, *walked(packed, row, before)}
        assert ids.max(initial=0) <= filled


@settings(max_examples=60)
@given(batches())
def test_what_is_spread_is_found_where_it_is_trained(made: tuple[list[Trajectory], list[int]]) -> None:
    trajectories, groups = made
    packed = pack(trajectories, ROW, groups=groups)
    values = [np.random.default_rng(i).random(len(t)).astype(np.float32) for i, t in enumerate(trajectories)]
    for trajectory, value, found in zip(trajectories, values, packed.gather(packed.spread_tokens(values)), strict=True):
        np.testing.assert_array_equal(found[trajectory.mask], value[trajectory.mask])
    spread = packed.spread(np.arange(1.0, len(trajectories) + 1))
    for i, (trajectory, found) in enumerate(zip(trajectories, packed.gather(spread), strict=True)):
        assert (found[trajectory.mask] == i + 1).all()
    assert not spread[packed.batch.segment_ids == 0].any()


@settings(max_examples=60)
@given(batches())
def test_sharing_never_needs_more_rows_or_tokens(made: tuple[list[Trajectory], list[int]]) -> None:
    trajectories, groups = made
    packed = pack(trajectories, ROW, groups=groups)
    assert packed.batch.shape[0] <= pack(trajectories, ROW).batch.shape[0]
    assert np.count_nonzero(packed.batch.segment_ids) <= sum(map(len, trajectories))


def stored(trajectories: list[Trajectory], row_length: int = 10**4, groups: list[int] | None = None) -> int:
    packed = pack(trajectories, row_length, groups=groups or [0] * len(trajectories))
    return np.count_nonzero(packed.batch.segment_ids)


def test_answers_stand_behind_one_copy_of_their_prompt() -> None:
    packed = pack(group(40, [10, 12, 9]), ROW, groups=[0] * 3)
    assert packed.batch.shape[0] == 1
    assert packed.batch.parents[0, [0, 1, 39, 40, 41, 52, 53, 62, 63]].tolist() == [-1, 0, 38, 39, 40, 39, 52, 39, 62]
    assert packed.batch.positions[0, [0, 39, 40, 52, 62]].tolist() == [0, 39, 40, 40, 40]
    assert np.bincount(packed.batch.segment_ids[0]).tolist() == [ROW - 71, 50, 12, 9]


def test_the_turns_of_an_agent_are_one_sequence_of_which_each_turn_is_trained_once() -> None:
    turns = turns_of(np.full(30, 99), [(10, 5), (8, 3), (6, 0)], 0)
    assert stored(turns) == len(turns[-1]) == 62
    packed = pack(turns, ROW, groups=[0] * 3)
    assert packed.batch.mask[0].tolist() == [30 <= i < 40 or 45 <= i < 53 or 56 <= i < 62 for i in range(ROW)]
    assert packed.batch.parents[0, :62].tolist() == list(range(-1, 61))
    assert packed.batch.segment_ids[0, [30, 39, 45, 52, 56, 61]].tolist() == [1, 1, 2, 2, 3, 3]


def test_agents_that_leave_their_reasoning_out_of_later_prompts_share_the_rest() -> None:
    rng, context, made, needed = np.random.default_rng(0), np.full(30, 99), [], 30
    for _ in range(3):
        thought, answer, told = (rng.integers(0, 50, n) for n in (20, 25, 10))
        tokens = np.concatenate([thought, answer]).astype(np.int32)
        made.append(Trajectory.from_completion(context.astype(np.int32), tokens, np.zeros(45), np.zeros(45)))
        context = np.concatenate([context, answer, told])
        needed += len(tokens) + len(answer) + len(told)
    assert stored(made) == needed - 25 - 10  # nothing comes behind the last


def test_what_two_trajectories_train_is_there_twice_behind_what_they_share() -> None:
    prompt, same = np.arange(30), np.zeros(10, np.int32)
    made = [Trajectory.from_completion(prompt, same, same.astype(np.float32), same) for _ in range(2)]
    assert stored(made) == 30 + 2 * 10
    context = np.append(prompt, [*same, 7, 7, 7]).astype(np.int32)
    later = Trajectory.from_completion(context, same, same.astype(np.float32), same)
    assert stored([*made, later]) == 30 + 2 * 10 + 3 + 10  # behind one of the two
    untrained = [replace(t, mask=np.zeros(40, np.bool_)) for t in made]
    assert stored(untrained) == 40
    assert pack(untrained, ROW, groups=[0, 0]).places.segments.tolist() == [1, 0]


def test_a_group_too_large_for_a_row_is_divided_and_each_part_has_a_copy() -> None:
    packed = pack(group(40, [20] * 4), ROW, groups=[0] * 4)
    assert packed.batch.shape[0] == 2
    assert sorted(packed.places.rows.tolist()) == [0, 0, 1, 1]
    assert np.count_nonzero(packed.batch.segment_ids) == 2 * 40 + 4 * 20
    assert stored(group(60, [20, 20]), ROW) == 2 * 80  # each alone in a row


def test_parts_of_a_group_are_those_that_share_most() -> None:
    agents = [turns_of(np.full(20, 99), [(10, 10), (10, 10), (10, 0)], seed) for seed in range(2)]
    assert stored([*agents[0], *agents[1]], ROW) == 2 * 70
    (trie,) = tries_of([*agents[0], *agents[1]], [0] * 6)
    assert [sorted(part.members) for part in divided(trie, ROW)] == [[0, 1, 2], [3, 4, 5]]
    assert [part.size for part in divided(trie, 2 * 70 - 20)] == [2 * 70 - 20]


@settings(max_examples=60)
@given(batches(), st.integers(1, ROW))
def test_parts_have_all_trajectories_once_and_no_more_tokens_than_allowed(
    made: tuple[list[Trajectory], list[int]], most: int
) -> None:
    trajectories, groups = made
    found = []
    for trie in tries_of(trajectories, groups):
        longest = max(len(trajectories[i]) for i in trie.root.held)
        for part in divided(trie, most):
            found += part.members
            assert part.size <= max(most, longest)
            assert len({int(trajectories[i].tokens[0]) for i in part.members}) == 1
    assert sorted(found) == list(range(len(trajectories)))


def test_few_tokens_are_not_shared_by_branches() -> None:
    assert stored(group(MIN_SHARED_TOKENS - 1, [5, 5])) == 2 * (MIN_SHARED_TOKENS + 4)
    assert stored(group(MIN_SHARED_TOKENS, [5, 5])) == MIN_SHARED_TOKENS + 10
    trunk = np.arange(20)
    made = [member(np.concatenate([trunk, [60 + i, 63, 70]]), 5, seed) for seed, i in enumerate((0, 1, 1))]
    assert stored(made) == 20 + 3 * 8


def test_members_of_different_groups_share_nothing() -> None:
    assert stored(group(30, [5, 5]), groups=[0, 1]) == 70


def test_images_are_not_shared() -> None:
    images = Images(np.zeros((4, 6), np.float32), np.array([[1, 2, 2]], np.int32))
    made = [replace(t, images=images) for t in group(30, [5, 5])] + group(30, [5, 5])
    assert stored(made) == 2 * 35 + 30 + 2 * 5


def test_what_sampling_kept_stays_with_the_trajectory_that_trains_the_token() -> None:
    turns = turns_of(np.full(30, 99), [(4, 5), (3, 0)], 0)
    own = np.concatenate([np.full(30, 0), np.full(4, 2)]).astype(np.int32)
    ids = np.stack([turns[0].tokens[30:], turns[0].tokens[30:] + 1], axis=1).reshape(-1).astype(np.int32)
    kept = Kept(own, ids)
    elsewhere = Kept.joined([Kept.everything(30), Kept(np.ones(4, np.int32), turns[0].tokens[30:]), Kept.everything(8)])
    made = [replace(turns[0], kept=kept), replace(turns[1], kept=elsewhere)]
    pairs = pack(made, ROW, groups=[0, 0]).batch.kept[0]
    wanted = np.stack([np.repeat(np.arange(30, 34), 2), ids], axis=1)
    assert sorted(pairs[pairs[:, 0] >= 0].tolist()) == sorted(wanted.tolist())


def test_weights_and_advantages_of_trained_tokens_are_those_without_sharing() -> None:
    agents = [turns_of(np.full(30, 99), [(10 + seed, 5), (8, 3), (6, 0)], seed) for seed in range(4)]
    episodes = tuple(Episode(Scored(float(i % 3)), tuple(turns)) for i, turns in enumerate(agents))
    groups = [Group(Task("a", ""), 0, 0, episodes)]
    found = [make_batches(groups, grpo(), 256, Models(None), share_prompts=shares)[0] for shares in (False, True)]
    alone, shared = ([np.sort(np.asarray(x)[b.mask]) for x in (b.weights, b.advantages, b.behavior_logp)] for b in found)
    for x, y in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(x, y)


def test_without_groups_rows_have_no_parents() -> None:
    assert pack(group(30, [5, 5]), ROW).batch.parents is None
    assert (pack([], ROW, groups=[]).batch.parents == -1).all()


def test_pairs_cannot_share() -> None:
    with pytest.raises(ValueError, match="stay together"):
        pack(group(30, [5, 5]), ROW, together=2, groups=[0, 0])
