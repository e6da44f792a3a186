"""Conversion of packed rows to flat ones: sequences one after another, without padding.

Packing serves programs of fixed shapes. torch supports any shape, so the model gets the sequences
of packed rows in one row as long as all of them, and each attends to itself
(areal_x_torch.attention); every other layer treats tokens separately. Where sequences share tokens
(`Batch.parents`), "a sequence" here is a node of their trie, which continues the node above it. A loss
gets the packed rows themselves, because their segments may belong together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int64

from areal_x.protocols.tries import Nodes, continued, nodes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FlatRow:
    """Some sequences of packed rows in one flat row."""

    places: Int64[np.ndarray, " tokens"]
    """Index of each token in the flattened packed rows."""

    lengths: Int64[np.ndarray, " sequences"]

    prefixes: Int64[np.ndarray, " sequences"]
    """For each sequence the earlier one that it continues, as others may, or −1."""

    padding: int = 0
    """Tokens at the end that exist only because several processes compute together: a sequence whose
    outputs are never read."""

    @property
    def positions(self) -> Int64[np.ndarray, " tokens"]:
        """Position of each token, after those that its sequence continues."""
        before = seen(self.lengths, self.prefixes) - self.lengths
        return _positions_within(self.lengths) + np.repeat(before, self.lengths)

    def take(self, x: np.ndarray) -> np.ndarray:
        """Returns the entries of an array of packed rows at these tokens."""
        return x.reshape(-1, *x.shape[2:])[self.places]

    def read(
        self, wanted: Bool[np.ndarray, "rows length"], before: bool, own: slice
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the indices, in the part `own` of this row, of the hidden states that the wanted
        tokens' outputs are computed from, and those tokens' indices in the packed rows.

        before: a token's state is the one of the token before it, the last of those that its
        sequence continues, and a first token has none; otherwise its own. The shift by one happens
        here and nowhere else: the process that has a token's state may not have the token.
        """
        chosen = self.take(wanted)
        chosen[len(chosen) - self.padding :] = False
        states = np.arange(len(chosen))
        if before:
            ends = np.cumsum(self.lengths)
            states -= 1
            states[ends - self.lengths] = np.where(self.prefixes < 0, -1, ends[self.prefixes] - 1)
            chosen = chosen & (states >= 0)
        found = np.flatnonzero(chosen)
        state_at = states[found]
        here = (state_at >= own.start) & (state_at < own.stop)
        return state_at[here] - own.start, self.places[found[here]]

    def real_tokens(self, own: slice) -> int:
        """Returns the number of tokens of the part `own` that are not padding; they come first."""
        return max(min(own.stop, len(self.places) - self.padding) - own.start, 0)


@dataclass(frozen=True)
class ContinuedRow(FlatRow):
    """A flat row of the tokens that another one follows, whose outputs can be read of all tokens.

    A datum of the Tinker API may name at each token a target that is not the next one: a leaf of its
    trie, whose state is read by none. Without its leaves such a trie is one sequence again."""

    before: Int64[np.ndarray, " packed"] = field(kw_only=True)
    """Index of the token before each in the flattened packed rows, −1 for none."""

    def read(
        self, wanted: Bool[np.ndarray, "rows length"], before: bool, own: slice
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        if not before or own != slice(0, len(self.places)):
            raise NotImplementedError("the states of tokens that none follows were not computed")
        at = np.full(len(self.before) + 1, -1)  # the last is that of none
        at[self.places] = np.arange(len(self.places))
        states = at[self.before]
        tokens = np.flatnonzero(wanted.reshape(-1) & (states >= 0))
        return states[tokens], tokens


def padding_row(tokens: int) -> FlatRow:
    """Returns the row of a pass that only other processes need."""
    return FlatRow(np.zeros(tokens, np.int64), np.array([tokens]), np.array([-1]), padding=tokens)


def padded_to_multiple(flat: FlatRow, parts: int) -> FlatRow:
    """Returns the row with the fewest padding tokens that give `parts` processes equally many
    tokens."""
    padding = -len(flat.places) % parts
    if not padding:
        return flat
    places = np.append(flat.places, np.zeros(padding, np.int64))
    return FlatRow(places, np.append(flat.lengths, padding), np.append(flat.prefixes, -1), padding)


def to_tensor(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Converts to the widths that torch computes and indexes with."""
    import torch  # the driver, which divides batches, does without it

    wide = {"f": np.float32, "i": np.int64, "u": np.int64}.get(x.dtype.kind, x.dtype)
    return torch.from_numpy(x.astype(wide, copy=False)).to(device)


def flatten_rows(
    segment_ids: Int64[np.ndarray, "rows length"],
    budget: int,
    parents: Int64[np.ndarray, "rows length"] | None = None,
) -> list[FlatRow]:
    """Returns the sequences of packed rows, longest first, in the fewest flat rows of about
    `budget` tokens, shared evenly.

    parents: see `areal_x.types.Batch`. A trie stays together, in preorder, and counts as one sequence
    as long as all of its nodes.
    """
    rows, length = segment_ids.shape
    if parents is None:
        filled = np.flatnonzero(segment_ids)
        keys = (np.arange(rows)[:, None] * (length + 1) + segment_ids).reshape(-1)[filled]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        starts, lengths = filled[begins], np.diff(begins, append=len(keys))
        prefixes = np.full(len(starts), -1)
    else:
        starts, lengths, prefixes = _all_nodes(parents, segment_ids)
    numbers = np.arange(len(starts))
    # the first node of each one's trie
    sets = np.maximum.accumulate(np.where(prefixes < 0, numbers, 0))
    totals = np.bincount(sets, lengths, len(sets)).astype(np.int64)
    # Equal lengths are neighbours, which `areal_x_torch.attention.sdpa` computes together.
    order = np.lexsort((numbers, sets, -totals[sets]))
    starts, lengths, prefixes = (
        starts[order],
        lengths[order],
        np.append(np.argsort(order), -1)[prefixes[order]],
    )
    firsts = np.flatnonzero(prefixes < 0)
    sizes, tokens = totals[order][firsts], int(lengths.sum())
    parts = -(-tokens // budget)
    middles = np.cumsum(sizes) - sizes / 2
    even = np.arange(1, parts) * (tokens / max(parts, 1))
    cuts = np.searchsorted(middles, even)
    bounds = [0, *np.append(firsts, len(order))[cuts].tolist(), len(order)]
    of_parts = [slice(first, last) for first, last in pairwise(bounds) if first < last]
    return [
        FlatRow(
            np.repeat(starts[part], lengths[part]) + _positions_within(lengths[part]),
            lengths[part],
            np.where(prefixes[part] < 0, -1, prefixes[part] - part.start),
        )
        for part in of_parts
    ]


def continued_rows(
    segment_ids: Int64[np.ndarray, "rows length"],
    parents: Int64[np.ndarray, "rows length"],
    budget: int,
) -> list[FlatRow]:
    """Returns the tokens of packed rows that another one follows, as `flatten_rows` does."""
    found = continued(parents, segment_ids)
    firsts = np.arange(len(parents))[:, None] * parents.shape[1]
    at = (firsts + found.at).reshape(-1)
    known = (segment_ids > 0) & (parents >= 0)
    before = np.where(known, firsts + parents, -1).reshape(-1)
    return [
        ContinuedRow(at[flat.places], flat.lengths, flat.prefixes, before=before)
        for flat in flatten_rows(found.segment_ids(), budget, found.parents)
    ]


def _all_nodes(
    parents: Int64[np.ndarray, "rows length"], segment_ids: Int64[np.ndarray, "rows length"]
) -> Nodes:
    """Returns the nodes of all rows, with starts in the flattened rows."""
    found, first = [], 0
    for row, (own, ids) in enumerate(zip(parents, segment_ids, strict=True)):
        starts, lengths, above = nodes(own, ids)
        found.append((starts + row * len(own), lengths, np.where(above < 0, -1, above + first)))
        first += len(starts)
    none = np.zeros(0, np.int64)
    return Nodes(*(np.concatenate([none, *parts]) for parts in zip(*found, strict=True)))


def seen(
    lengths: Int64[np.ndarray, " sequences"], prefixes: Int64[np.ndarray, " sequences"]
) -> Int64[np.ndarray, " sequences"]:
    """Returns the number of tokens that the last token of each sequence sees, itself included."""
    found = lengths.copy()
    for i in np.flatnonzero(prefixes >= 0).tolist():  # each after the one that it continues
        found[i] += found[prefixes[i]]
    return found


def group_by_length(lengths: Int64[np.ndarray, " n"], budget: int) -> list[Int64[np.ndarray, " m"]]:
    """Returns the indices 0 … n-1 in groups of similar lengths, longest first.

    A group's count times its longest is at most `budget`, unless it is a single one. The indices
    after a group are shared evenly by the fewest groups that could hold them, so that no group is a
    remnant.
    """
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        count = max(1, budget // max(int(lengths[order[start]]), 1))
        left = -(-(len(order) - start) // count)
        count = -(-(len(order) - start) // left)
        groups.append(order[start : start + count])
        start += count
    return groups


def _positions_within(lengths: Int64[np.ndarray, " sequences"]) -> Int64[np.ndarray, " tokens"]:
    """Returns 0 … length − 1 for each, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
