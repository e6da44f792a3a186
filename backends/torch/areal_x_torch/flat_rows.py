"""From packed rows to flat ones: sequences one after the other, without padding.

Packing serves programs of fixed shapes. torch takes any shape, so for the model the sequences of
packed rows lie in one row, as long as they are together, and attend each to itself
(areal_x_torch.attention); every other layer sees tokens alone. A loss sees the packed rows
themselves: their segments may belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int64

from areal_x.types import Batch


@dataclass(frozen=True)
class FlatRow:
    """Some sequences of packed rows in one flat row.

    places: where in the flattened packed rows each token lies. lengths: of each sequence. prefixes:
    of each the earlier one that it goes on from, a prompt that several share, or −1. silent: how
    many tokens at the end are there only because several processes compute together, a sequence of
    which nothing is read.
    """

    places: Int64[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " sequences"]
    prefixes: Int64[np.ndarray, " sequences"]
    padding: int = 0

    @property
    def positions(self) -> Int64[np.ndarray, " tokens"]:
        """Of each token in its sequence, the shared part included."""
        before = np.where(self.prefixes >= 0, self.lengths[self.prefixes], 0)
        return _positions_within(self.lengths) + np.repeat(before, self.lengths)

    def take(self, x: np.ndarray) -> np.ndarray:
        """What stands in packed rows at these tokens."""
        return x.reshape(-1, *x.shape[2:])[self.places]

    def read(
        self, wanted: Bool[np.ndarray, "rows length"], before: bool, own: slice
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The places in the part `own` of this row, from its begin on, whose hidden states tell of
        wanted tokens, and those tokens' in the packed rows.

        before: of a token tells the one before it, and of a sequence's first none; else itself. The
        shift by one happens here and nowhere else: whoever has the state that tells of a token may
        not have the token.
        """
        chosen = self.take(wanted)
        chosen[len(chosen) - self.padding :] = False
        if before:
            chosen = chosen & (_positions_within(self.lengths) > 0)
        found = np.flatnonzero(chosen)
        state_at = found - before
        here = (state_at >= own.start) & (state_at < own.stop)
        return state_at[here] - own.start, self.places[found[here]]

    def real_tokens(self, own: slice) -> int:
        """How many tokens of the part `own` are not silent; they come first."""
        return max(min(own.stop, len(self.places) - self.padding) - own.start, 0)


def padding_row(tokens: int) -> FlatRow:
    """For a pass that only other processes need."""
    return FlatRow(np.zeros(tokens, np.int64), np.array([tokens]), np.array([-1]), padding=tokens)


def padded_to_multiple(flat: FlatRow, parts: int) -> FlatRow:
    """The same with as few silent tokens at the end as `parts` processes need to have as many
    tokens each."""
    padding = -len(flat.places) % parts
    if not padding:
        return flat
    places = np.append(flat.places, np.zeros(padding, np.int64))
    return FlatRow(places, np.append(flat.lengths, padding), np.append(flat.prefixes, -1), padding)


def micro_batches(batch: Batch, most: int, shares: int = 1) -> list[list[Batch]]:
    """The packed rows that hold a sequence, shared evenly by the fewest micro-batches of at most
    `most` rows for each of so many processes; of each micro-batch the rows of every one. Who has
    none left has one of padding: all make the same passes.
    """
    rows = np.flatnonzero(batch.segment_ids.any(axis=1))
    groups = np.array_split(rows, -(-len(rows) // (most * shares))) if len(rows) else []
    padding = batch.map(lambda x: np.zeros_like(x[:1]))
    return [
        [
            batch.map(lambda x, own=own: x[own]) if len(own) else padding
            for own in np.array_split(group, shares)
        ]
        for group in groups
    ]


def to_tensor(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers in the widths that torch computes and indexes with."""
    wide = {"f": np.float32, "i": np.int64, "u": np.int64}.get(x.dtype.kind, x.dtype)
    return torch.from_numpy(x.astype(wide, copy=False)).to(device)


def flatten_rows(
    segment_ids: Int64[np.ndarray, "rows length"],
    budget: int,
    prefix_ids: Int64[np.ndarray, "rows length"] | None = None,
) -> list[FlatRow]:
    """The sequences of packed rows, longest first, in the fewest flat rows of about `budget`
    tokens, shared evenly.

    prefix_ids: as of `areal_x.types.Batch`. A prompt and those that share it stay together, in
    place of a sequence as long as all of them.
    """
    rows, length = segment_ids.shape
    filled = np.flatnonzero(segment_ids)
    keys = (np.arange(rows)[:, None] * (length + 1) + segment_ids).reshape(-1)[filled]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    starts, lengths, numbers = (
        filled[begins],
        np.diff(begins, append=len(keys)),
        np.arange(len(begins)),
    )
    prefixes = np.full(len(starts), -1)
    if prefix_ids is not None:
        of_each = prefix_ids.reshape(-1)[starts]
        prefixes = np.where(
            of_each > 0,
            np.searchsorted(keys[begins], starts // length * (length + 1) + of_each),
            -1,
        )
    sets = np.where(prefixes < 0, numbers, prefixes)  # the first of each one's set
    totals = np.bincount(sets, lengths, len(sets)).astype(np.int64)
    # Those of one length are neighbours, as `areal_x_torch.attention.sdpa` likes them.
    order = np.lexsort((-lengths, prefixes >= 0, sets, -totals[sets]))
    starts, lengths, prefixes = (
        starts[order],
        lengths[order],
        np.append(np.argsort(order), -1)[prefixes[order]],
    )
    parts, firsts = -(-len(filled) // budget), np.flatnonzero(prefixes < 0)
    sizes = totals[order][firsts]
    middles = np.cumsum(sizes) - sizes / 2
    even = np.arange(1, parts) * (len(filled) / max(parts, 1))
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


def group_by_length(lengths: Int64[np.ndarray, " n"], budget: int) -> list[Int64[np.ndarray, " m"]]:
    """The numbers 0 … n-1 in groups of like lengths, longest first.

    A group's count times its longest is at most `budget`, unless it is a single one. What follows a
    group is shared evenly by the fewest groups that could hold it, so that none is a remnant.
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
    """0 … length − 1 for each, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
