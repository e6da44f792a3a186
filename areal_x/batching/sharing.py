"""Prompt sharing: a prefix that trajectories of a group have in common is stored and computed once
a row.

    a row       │ prompt without last token │ last token, answer 1 │ last token, answer 2 │ … another set
    segment     │ 1                         │ 2                    │ 3                    │ 4 …
    attends to  │ itself                    │ itself and 1         │ itself and 1         │

The last token of the prompt stays with each answer, because its output is the distribution of the
answer's first token: so no head has to look beyond a segment. Only context is shared, tokens before
the first trained one, so that shared tokens have no term in the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.types import Trajectory

# Sharing fewer tokens saves less than the additional segment costs in attention.
MIN_SHARED_TOKENS = 16
# Sets are limited to 1/1, 1/2 and 1/4 of a row, and the best is taken: smaller sets need more
# copies of the prefix, but leave less room empty.
FRACTIONS_OF_A_ROW = (1, 2, 4)


class Placement(NamedTuple):
    """Positions of n trajectories in rows.

    The first `shared` tokens of each are at `shared_starts`, as segment `shared_segments` of its
    row (all 0 if it shares none); its own tokens, the rest, are at `starts`, as segment `segments`.
    """

    rows: Int32[np.ndarray, " n"]
    starts: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    shared: Int32[np.ndarray, " n"]
    shared_starts: Int32[np.ndarray, " n"]
    shared_segments: Int32[np.ndarray, " n"]


class PrefixSet(NamedTuple):
    """Trajectories, by index, whose first `shared` tokens are equal and stored once."""

    members: Int[np.ndarray, " members"]
    shared: int

    @property
    def saved_tokens(self) -> int:
        return self.shared * (len(self.members) - 1)


def place_shared(
    trajectories: Sequence[Trajectory], groups: Sequence[int], row_length: int
) -> Placement:
    """Packs sets of trajectories that share a prefix, by first-fit decreasing. groups: the group of
    each trajectory.

    A set too large for a row is split. Sets of a few maximum sizes, and no sharing at all, are
    tried: the placement with the fewest rows is returned, and of those the one with the fewest
    tokens.
    """
    lengths = np.array([len(t) for t in trajectories], np.int32)
    sets = find_prefix_sets(trajectories, groups)
    split_sets = [
        [part for one in sets for part in split(one, lengths, row_length // fraction)]
        for fraction in FRACTIONS_OF_A_ROW
    ]
    unshared = [PrefixSet(np.array([i]), 0) for i in range(len(lengths))]
    tried = [place_sets(sets, lengths, row_length) for sets in (*split_sets, unshared)]
    return min(tried, key=lambda found: (found[0].rows.max(initial=0), -found[1]))[0]


def find_prefix_sets(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> list[PrefixSet]:
    """Assigns every trajectory to one set of its own group. A trajectory that shares nothing is a
    set of its own, as is one with images."""
    contexts = [t.tokens[: np.argmax(np.append(t.mask, True))] for t in trajectories]
    by_group: dict[int, list[int]] = defaultdict(list)
    for i, (trajectory, group) in enumerate(zip(trajectories, groups, strict=True)):
        if trajectory.images is None:
            by_group[group].append(i)
    found = [one for members in by_group.values() for one in best_sets(np.array(members), contexts)]
    shared = np.concatenate([np.zeros(0, int), *(one.members for one in found)])
    return found + [
        PrefixSet(np.array([i]), 0) for i in np.setdiff1d(np.arange(len(trajectories)), shared)
    ]


def best_sets(
    members: Int[np.ndarray, " n"], contexts: Sequence[Int32[np.ndarray, " T"]]
) -> list[PrefixSet]:
    """The sets that save the most tokens: all members together, or separately those of each branch
    where their contexts diverge."""
    if len(members) < 2:
        return []
    shortest = min(len(contexts[i]) for i in members)
    prefixes = np.stack([contexts[i][:shortest] for i in members])
    common = int(np.argmin(np.append((prefixes == prefixes[0]).all(0), False)))
    together = [PrefixSet(members, common - 1)] if common > MIN_SHARED_TOKENS else []
    branches: dict[int | None, list[int]] = defaultdict(list)
    for i in members.tolist():
        branches[int(contexts[i][common]) if len(contexts[i]) > common else None].append(i)
    if len(branches) == 1:
        return together
    apart = [one for branch in branches.values() for one in best_sets(np.array(branch), contexts)]
    return max(together, apart, key=lambda sets: sum(one.saved_tokens for one in sets))


def split(whole: PrefixSet, lengths: Int32[np.ndarray, " n"], max_tokens: int) -> list[PrefixSet]:
    """Splits a set into sets of at most `max_tokens` tokens, or of one member if that is longer."""
    own = lengths[whole.members] - whole.shared
    parts, _, _ = first_fit_decreasing(own, max(max_tokens - whole.shared, int(own.max())))
    found = [whole.members[parts == part] for part in range(parts.max() + 1)]
    return [PrefixSet(members, whole.shared if len(members) > 1 else 0) for members in found]


def place_sets(
    sets: Sequence[PrefixSet], lengths: Int32[np.ndarray, " n"], row_length: int
) -> tuple[Placement, int]:
    """Packs whole sets; returns the placement and the number of tokens that sharing saves."""
    totals = np.array([lengths[one.members].sum() - one.saved_tokens for one in sets], np.int32)
    rows, starts, _ = first_fit_decreasing(totals, row_length)
    places = Placement(*(np.zeros(len(lengths), np.int32) for _ in Placement._fields))
    segments = np.zeros(len(lengths) + 1, np.int32)  # segments in each row so far
    for i in np.lexsort((starts, rows)).tolist():
        (members, shared), row = sets[i], rows[i]
        own = lengths[members] - shared
        places.rows[members] = row
        places.starts[members] = starts[i] + shared + np.cumsum(own) - own
        if shared:
            segments[row] += 1
            places.shared[members] = shared
            places.shared_starts[members] = starts[i]
            places.shared_segments[members] = segments[row]
        places.segments[members] = segments[row] + 1 + np.arange(len(members))
        segments[row] += len(members)
    return places, sum(one.saved_tokens for one in sets)
