"""From packed rows to rows that torch likes: one sequence a row, rows of like lengths together.

Packing serves programs of fixed shapes. torch takes any shape, so a packed batch is taken apart: no mask over other sequences,
no attention across them, no padding but the difference to the longest of the same micro-batch, and any model's own causal
attention gives what each sequence alone gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64

from areal_x.types import Batch


@dataclass(frozen=True)
class Micro:
    """Some sequences of a packed batch, one a row.

    places: where in the flattened batch each token lies. real: False at the padding behind a row's end.
    """

    places: Int64[np.ndarray, "sequences longest"]
    real: Bool[np.ndarray, "sequences longest"]

    def take(self, batch: Batch, device: torch.device) -> Batch:
        """The batch of these rows as tensors, 0 in padding; each row is one segment."""
        return batch.map(lambda x: self._take(x).to(device)).replace(
            segment_ids=torch.from_numpy(self.real.astype(np.int64)).to(device)
        )

    def _take(self, x: np.ndarray) -> torch.Tensor:
        x = np.asarray(x)
        taken = np.where(self.real, x.reshape(-1)[self.places], x.dtype.type(0))
        wide = {"f": np.float32, "i": np.int64, "u": np.int64}.get(x.dtype.kind, x.dtype)
        return torch.from_numpy(taken.astype(wide, copy=False))

    def flat(self, chosen: Bool[np.ndarray, "sequences longest"]) -> torch.Tensor:
        """The flat places of these rows where `chosen` holds for a token that another one precedes."""
        chosen = chosen & self.real
        chosen[:, 0] = False
        return torch.from_numpy(np.flatnonzero(chosen))


def take_apart(segment_ids: Any, budget: int) -> list[Micro]:
    """The sequences of packed rows, in micro-batches of at most `budget` places (or one sequence), longest first."""
    segment_ids = np.asarray(segment_ids)
    rows, length = segment_ids.shape
    filled = np.flatnonzero(segment_ids)
    keys = (np.arange(rows)[:, None] * (length + 1) + segment_ids).reshape(-1)[filled]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    starts, lengths = filled[begins], np.diff(begins, append=len(keys))
    return [_rows(starts[group], lengths[group]) for group in by_length(lengths, budget)]


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


def _rows(starts: np.ndarray, lengths: np.ndarray) -> Micro:
    steps = np.arange(lengths.max())
    real = steps < lengths[:, None]
    return Micro(np.where(real, starts[:, None] + steps, 0), real)
