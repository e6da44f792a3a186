"""What is read from the parents of a row's tokens, against walks from token to token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_x.protocols.tries import continued, nodes, paths, subtree_ends

PADDING = 3


@st.composite
def forests(draw: st.DrawFn) -> np.ndarray:
    """The parents of a row in preorder, without padding."""
    parents: list[int] = []
    while len(parents) < draw(st.integers(0, 40)):
        above = [-1, *ancestors(parents, len(parents) - 1)] if parents else [-1]
        parents.append(above[-1] if draw(st.booleans()) else draw(st.sampled_from(above)))
    return np.array(parents, np.int32)


def ancestors(parents: list[int], i: int) -> list[int]:
    """A token and those before it, the first one first."""
    return [*(ancestors(parents, parents[i]) if parents[i] >= 0 else []), i]


def row_of(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([np.ones(len(parents), np.int32), np.zeros(PADDING, np.int32)])
    return np.concatenate([parents, np.full(PADDING, -1, np.int32)]), ids


@given(forests())
def test_a_token_is_seen_by_its_descendants_and_no_others(parents: np.ndarray) -> None:
    ends = subtree_ends(*row_of(parents))
    for i in range(len(parents)):
        assert [j for j in range(i + 1) if i < ends[j]] == ancestors(parents.tolist(), i)
    assert not ends[len(parents) :].any()


@given(forests())
def test_nodes_part_where_a_token_is_continued_twice_or_not_by_the_next(parents: np.ndarray) -> None:
    starts, lengths, above = nodes(*row_of(parents))
    assert lengths.sum() == len(parents)
    continued = np.bincount(parents[parents >= 0], minlength=len(parents))
    for i, parent in enumerate(parents.tolist()):
        assert (i in starts) == (parent != i - 1 or parent < 0 or continued[parent] > 1)
    for start, node in zip(starts.tolist(), above.tolist(), strict=True):
        assert parents[start] == (-1 if node < 0 else starts[node] + lengths[node] - 1)


@given(forests())
def test_a_path_leads_to_each_token_that_none_continues(parents: np.ndarray) -> None:
    last = set(range(len(parents))) - set(parents.tolist())
    assert [path.tolist() for path in paths(*row_of(parents))] == [ancestors(parents.tolist(), i) for i in sorted(last)]


@given(st.lists(forests(), min_size=1, max_size=3))
def test_continued_tokens_are_those_with_children_and_lead_to_the_same_ancestors(of_rows: list[np.ndarray]) -> None:
    longest = max(map(len, of_rows)) + PADDING
    parents, ids = np.full((len(of_rows), longest), -1, np.int32), np.zeros((len(of_rows), longest), np.int32)
    for row, own in enumerate(of_rows):
        parents[row, : len(own)], ids[row, : len(own)] = own, 1
    found = continued(parents, ids, least=4)
    assert found.at.shape == found.parents.shape == (len(of_rows), found.at.shape[1])
    assert found.at.shape[1] in (4, 8, 16, 32, 64)
    for own, at, above, before, numbers in zip(
        of_rows, found.at.tolist(), found.parents.tolist(), found.before, found.segment_ids().tolist(), strict=True
    ):
        kept = sorted({parent for parent in own.tolist() if parent >= 0})
        assert at == kept + [-1] * (len(at) - len(kept))
        assert [at[x] if x >= 0 else -1 for x in above[: len(kept)]] == own[kept].tolist()
        assert set(above[len(kept) :]) | set(before[len(own) :].tolist()) <= {-1}
        assert [at[x] if x >= 0 else -1 for x in before[: len(own)].tolist()] == own.tolist()
        firsts = {ancestors(above, x)[0] for x in range(len(kept))}
        assert numbers == [sorted(firsts).index(ancestors(above, x)[0]) + 1 for x in range(len(kept))] + [0] * numbers.count(0)
    assert found.branches() == any(x >= 0 and x != i - 1 for row in found.parents.tolist() for i, x in enumerate(row))
