"""Prompts that the members of a group share, each laid into a row once and computed once.

    a row    │ prompt, but its last token │ its last token, answer 1 │ its last token, answer 2 │ … another set
    segment  │ 1                          │ 2                        │ 3                        │ 4 …
    sees     │ itself                     │ itself and 1             │ itself and 1             │

The last token of the prompt stays with each answer: what it says is about the answer's first token,
and so no head has to look beyond a segment. Shared is context alone, tokens before the first that
is trained on: nothing that counts lies there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.types import Trajectory

SHORTEST = 16  # shared tokens: fewer save less than one more segment costs attention
# the largest sets that are tried: smaller ones need more copies and leave less room empty
PARTS_OF_A_ROW = (1, 2, 4)


class Places(NamedTuple):
    """Where n trajectories lie in rows.

    Of each the first `shared` tokens lie from `shared_starts` on, as the segment `shared_segments`
    of its row (all 0 where it shares none), and the rest, which is its own, from `starts` on, as
    the segment `segments`.
    """

    rows: Int32[np.ndarray, " n"]
    starts: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    shared: Int32[np.ndarray, " n"]
    shared_starts: Int32[np.ndarray, " n"]
    shared_segments: Int32[np.ndarray, " n"]


class Set(NamedTuple):
    """Trajectories, by their numbers, of whose tokens the first `shared` are laid down once."""

    members: Int[np.ndarray, " members"]
    shared: int

    @property
    def saved(self) -> int:
        """Tokens."""
        return self.shared * (len(self.members) - 1)


def shared_places(
    trajectories: Sequence[Trajectory], groups: Sequence[int], row_length: int
) -> Places:
    """Packs by first-fit decreasing sets that share what they begin with. groups: whose each
    trajectory is.

    A set that a row does not hold is cut into several. Of a few sizes to which sets are cut, and of
    no sharing at all, that which fills the fewest rows is taken, and of equal ones that with the
    fewest tokens.
    """
    lengths = np.array([len(t) for t in trajectories], np.int32)
    sets = sets_of(trajectories, groups)
    of_sizes = [
        [part for one in sets for part in cut(one, lengths, row_length // parts)]
        for parts in PARTS_OF_A_ROW
    ]
    alone = [Set(np.array([i]), 0) for i in range(len(lengths))]
    tried = [place(sets, lengths, row_length) for sets in (*of_sizes, alone)]
    return min(tried, key=lambda found: (found[0].rows.max(initial=0), -found[1]))[0]


def sets_of(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> list[Set]:
    """Every trajectory in one set, of its group; one that shares nothing is alone. With images a
    trajectory shares nothing."""
    contexts = [t.tokens[: np.argmax(np.append(t.mask, True))] for t in trajectories]
    of_groups: dict[int, list[int]] = defaultdict(list)
    for i, (trajectory, group) in enumerate(zip(trajectories, groups, strict=True)):
        if trajectory.images is None:
            of_groups[group].append(i)
    found = [one for members in of_groups.values() for one in branches(np.array(members), contexts)]
    shared = np.concatenate([np.zeros(0, int), *(one.members for one in found)])
    return found + [
        Set(np.array([i]), 0) for i in np.setdiff1d(np.arange(len(trajectories)), shared)
    ]


def branches(
    members: Int[np.ndarray, " n"], contexts: Sequence[Int32[np.ndarray, " T"]]
) -> list[Set]:
    """The sets that save the most: of all members together, or of those on each branch where their
    contexts part."""
    if len(members) < 2:
        return []
    shortest = min(len(contexts[i]) for i in members)
    begins = np.stack([contexts[i][:shortest] for i in members])
    common = int(np.argmin(np.append((begins == begins[0]).all(0), False)))
    together = [Set(members, common - 1)] if common > SHORTEST else []
    following: dict[int | None, list[int]] = defaultdict(list)
    for i in members.tolist():
        following[int(contexts[i][common]) if len(contexts[i]) > common else None].append(i)
    if len(following) == 1:
        return together
    apart = [one for branch in following.values() for one in branches(np.array(branch), contexts)]
    return max(together, apart, key=lambda sets: sum(one.saved for one in sets))


def cut(whole: Set, lengths: Int32[np.ndarray, " n"], most: int) -> list[Set]:
    """Sets of the same members of at most so many tokens each, where a member's own length allows
    it."""
    own = lengths[whole.members] - whole.shared
    parts, _, _ = first_fit_decreasing(own, max(most - whole.shared, int(own.max())))
    found = [whole.members[parts == part] for part in range(parts.max() + 1)]
    return [Set(members, whole.shared if len(members) > 1 else 0) for members in found]


def place(
    sets: Sequence[Set], lengths: Int32[np.ndarray, " n"], row_length: int
) -> tuple[Places, int]:
    """Packs whole sets; where everything lies, and how many tokens are saved."""
    totals = np.array([lengths[one.members].sum() - one.saved for one in sets], np.int32)
    rows, starts, _ = first_fit_decreasing(totals, row_length)
    places = Places(*(np.zeros(len(lengths), np.int32) for _ in Places._fields))
    held = np.zeros(len(lengths) + 1, np.int32)  # segments in each row
    for i in np.lexsort((starts, rows)).tolist():
        (members, shared), row = sets[i], rows[i]
        own = lengths[members] - shared
        places.rows[members] = row
        places.starts[members] = starts[i] + shared + np.cumsum(own) - own
        if shared:
            held[row] += 1
            places.shared[members] = shared
            places.shared_starts[members] = starts[i]
            places.shared_segments[members] = held[row]
        places.segments[members] = held[row] + 1 + np.arange(len(members))
        held[row] += len(members)
    return places, sum(one.saved for one in sets)
