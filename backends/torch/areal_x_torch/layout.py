"""From packed rows to rows that torch likes: one sequence a row, rows of like lengths together.

Packing serves programs of fixed shapes. torch takes any shape, so for the model packed rows are taken apart: no mask over other
sequences, no attention across them, no padding but the difference to the longest beside it, and any model's own causal
attention gives what each sequence alone gives. A loss sees the packed rows themselves: their segments may belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64

from areal_x.errors import UserError
from areal_x.types import Batch


@dataclass(frozen=True)
class Sequences:
    """Some sequences of packed rows, one a row.

    places: where in the flattened packed rows each token lies. real: False at the padding behind a row's end.
    """

    places: Int64[np.ndarray, "sequences longest"]
    real: Bool[np.ndarray, "sequences longest"]

    def take(self, x: np.ndarray) -> np.ndarray:
        """These sequences of packed rows, 0 in padding."""
        return np.where(self.real, x.reshape(-1)[self.places], x.dtype.type(0))

    def read(
        self, wanted: Bool[np.ndarray, "rows length"], before: bool
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """The flat places in these rows whose hidden states tell of the wanted tokens, and those tokens' in the packed rows.

        before: of a token tells the one before it, and of a sequence's first none; else itself. The shift by one happens here
        and nowhere else.
        """
        chosen = self.take(wanted)
        chosen[:, 0] &= not before
        found = np.flatnonzero(chosen)
        return found - before, self.places.reshape(-1)[found]


def refuse_images(batch: Batch) -> None:
    """Raises: UserError for a batch with images."""
    if batch.has_images:
        raise UserError("the batch has images, which the torch backend does not train on yet: use train.backend = 'jax'")


def micro_batches(batch: Batch, most: int, shares: int = 1) -> list[list[Batch]]:
    """The packed rows that hold a sequence, shared evenly by the fewest micro-batches of at most `most` rows for each of so
    many processes; of each micro-batch the rows of every one. Who has none left has one of padding: all make the same passes.
    """
    rows = np.flatnonzero(batch.segment_ids.any(axis=1))
    groups = np.array_split(rows, -(-len(rows) // (most * shares))) if len(rows) else []
    padding = batch.map(lambda x: np.zeros_like(x[:1]))
    return [
        [batch.map(lambda x, own=own: x[own]) if len(own) else padding for own in np.array_split(group, shares)]
        for group in groups
    ]


def to_tensor(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers in the widths that torch computes and indexes with."""
    wide = {"f": np.float32, "i": np.int64, "u": np.int64}.get(x.dtype.kind, x.dtype)
    return torch.from_numpy(x.astype(wide, copy=False)).to(device)


def take_apart(segment_ids: Int64[np.ndarray, "rows length"], budget: int) -> list[Sequences]:
    """The sequences of packed rows, in groups of at most `budget` places (or one sequence), longest first."""
    rows, length = segment_ids.shape
    filled = np.flatnonzero(segment_ids)
    keys = (np.arange(rows)[:, None] * (length + 1) + segment_ids).reshape(-1)[filled]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    starts, lengths = filled[begins], np.diff(begins, append=len(keys))
    return [_rows(starts[group], lengths[group]) for group in by_length(lengths, budget)]


NO_SEQUENCE = Sequences(np.zeros((1, 1), np.int64), np.zeros((1, 1), bool))  # for a pass that only other processes need


def by_length(lengths: Int64[np.ndarray, " n"], budget: int) -> list[Int64[np.ndarray, " m"]]:
    """The numbers 0 … n-1 in groups of like lengths, longest first.

    A group's count times its longest is at most `budget`, unless it is a single one. What follows a group is shared
    evenly by the fewest groups that could hold it, so that none is a remnant.
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


def _rows(starts: np.ndarray, lengths: np.ndarray) -> Sequences:
    steps = np.arange(lengths.max())
    real = steps < lengths[:, None]
    return Sequences(np.where(real, starts[:, None] + steps, 0), real)
