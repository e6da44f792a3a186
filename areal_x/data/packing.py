"""Sequences into rows of a fixed length, by first-fit decreasing; and values of sequences or tokens into the same places.

Longest first, each into the first row with room for it; a sequence is never cut. At most 11/9 of the fewest possible rows plus
6/9 are needed (G. Dósa, The tight bound of first fit decreasing bin-packing algorithm, 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64

from areal_x.errors import UserError, positive
from areal_x.types import NOT_RECORDED, NOT_THE_POLICY, Batch, Trajectory


@dataclass(frozen=True)
class Packed:
    """A batch of rows, and where in it each of the n trajectories lies.

    Trajectory i holds the places `starts[i] : starts[i] + lengths[i]` of row `rows[i]`, under the segment id `segments[i]`.
    In the batch tokens, segment_ids, positions, mask, behavior_logp and versions are filled, and, if a trajectory has any,
    experts and what speaks of images; everything else is None.
    """

    batch: Batch
    rows: Int32[np.ndarray, " n"]
    starts: Int32[np.ndarray, " n"]
    lengths: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]

    def spread(self, values: Float32[np.ndarray, " n"]) -> Float32[np.ndarray, "rows length"]:
        """Each trajectory's value at all its tokens, 0 in padding."""
        return self._scatter(np.repeat(np.asarray(values, np.float32), self.lengths))

    def spread_tokens(self, values: Sequence[Float32[np.ndarray, " T"]]) -> Float32[np.ndarray, "rows length"]:
        """Each trajectory's array, one value a token, where its tokens lie; 0 in padding."""
        if [len(v) for v in values] != self.lengths.tolist():
            raise ValueError(f"expected one value for each token of {len(self.lengths)} trajectories")
        return self._scatter(np.concatenate([np.zeros(0, np.float32), *values]).astype(np.float32))

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        """The inverse of `spread_tokens`: from `[rows, length]` one array a trajectory, in the order they were given."""
        return np.split(x.reshape(-1)[self._places()], np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def _scatter(self, values: Float32[np.ndarray, " tokens"]) -> Float32[np.ndarray, "rows length"]:
        out = np.zeros(self.batch.shape, np.float32)
        out.reshape(-1)[self._places()] = values
        return out

    def _places(self) -> Int64[np.ndarray, " tokens"]:
        return _places(self.rows, self.starts, self.lengths, self.batch.shape[1])


def pack(trajectories: Sequence[Trajectory], row_length: int, rows_multiple: int = 1, together: int = 1) -> Packed:
    """Packs whole trajectories into rows `[rows, row_length]`; empty rows fill up to a multiple of `rows_multiple`.

    There is always a row. Which lengths share one depends on the lengths alone; equal lengths keep the order they came in.
    together: so many that follow each other stay neighbours in one row (2: pairs, with the segment ids 2k - 1 and 2k).
    Raises: UserError for trajectories longer than a row, naming the setting to raise.
    """
    positive("train.row_length", row_length)
    lengths = np.array([len(t) for t in trajectories], np.int32)
    if len(lengths) and lengths.min() == 0:
        raise ValueError(f"trajectory {lengths.argmin()} has no tokens")
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} trajectories do not make whole sets of {together}")
    sets = lengths.reshape(-1, together)
    totals = sets.sum(1, dtype=np.int32)
    if len(totals) and totals.max() > row_length:
        what = "a sequence" if together == 1 else f"a set of {together} sequences"
        raise UserError(
            f"{what} of {totals.max()} tokens does not fit into a row of {row_length}, and sequences are never cut: "
            f"raise train.row_length to at least {totals.max()}, or lower sampling.max_tokens"
        )
    of_sets = first_fit_decreasing(totals, row_length)
    rows, starts, segments = (np.repeat(x, together) for x in of_sets)
    starts += (np.cumsum(sets, axis=1, dtype=np.int32) - sets).reshape(-1)
    segments = (segments - 1) * together + np.tile(np.arange(1, together + 1, dtype=np.int32), len(sets))
    used = int(rows.max()) + 1 if len(rows) else 1
    shape = (-(-used // rows_multiple) * rows_multiple, row_length)
    places = _places(rows, starts, lengths, row_length)

    def filled(values: Sequence[np.ndarray], dtype: Any, padding: float = 0) -> np.ndarray:
        each = values[0].shape[1:] if len(values) else ()
        out = np.full((*shape, *each), padding, dtype)
        if len(values):
            out.reshape(-1, *each)[places] = np.concatenate(values)
        return out

    experts = experts_of(trajectories)
    batch = Batch(
        tokens=filled([t.tokens for t in trajectories], np.int32),
        segment_ids=filled([np.repeat(segments, lengths)], np.int32),
        positions=filled([_within(lengths)], np.int32),
        mask=filled([t.mask for t in trajectories], np.bool_),
        behavior_logp=filled([t.logprobs for t in trajectories], np.float32),
        versions=filled([t.versions for t in trajectories], np.int32, padding=NOT_THE_POLICY),
        experts=filled(experts, np.int16, padding=NOT_RECORDED) if experts else None,
        **images_of_rows(trajectories, rows, starts, segments, shape[0]),
    )
    return Packed(batch, rows, starts, lengths, segments)


def experts_of(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The recorded experts of each, -1 of those without; empty where none has any."""
    recorded = [t.experts for t in trajectories if t.experts is not None]
    if len({x.shape[1:] for x in recorded}) > 1:
        raise ValueError("trajectories with experts of different models cannot share a batch")
    if not recorded:
        return []
    nothing = np.full((1, *recorded[0].shape[1:]), NOT_RECORDED, np.int16)
    return [np.repeat(nothing, len(t), axis=0) if t.experts is None else t.experts for t in trajectories]


def images_of_rows(
    trajectories: Sequence[Trajectory],
    rows: Int32[np.ndarray, " n"],
    starts: Int32[np.ndarray, " n"],
    segments: Int32[np.ndarray, " n"],
    count: int,
) -> dict[str, np.ndarray]:
    """What a batch of `count` rows says of images, those of a row in the order of its tokens; nothing where there are none."""
    in_order = ((i, trajectories[i].images) for i in np.lexsort((starts, rows)).tolist())
    seen = {i: images for i, images in in_order if images is not None and len(images.grids)}
    if not seen:
        return {}
    if len(widths := {images.patches.shape[1] for images in seen.values()}) > 1:
        raise UserError(f"patches of {sorted(widths)} features cannot share a batch: they are of different models' processors")

    def filled(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        lengths = np.bincount(rows[list(seen)], [len(x) for x in values], count).astype(np.int64)
        out = np.zeros((count, lengths.max(), *values[0].shape[1:]), dtype)
        out[np.repeat(np.arange(count), lengths), _within(lengths)] = np.concatenate(values)
        return out

    return {
        "patches": filled([images.patches for images in seen.values()], np.float32),
        "grids": filled([images.grids for images in seen.values()], np.int32),
        "image_segments": filled([np.full(len(images.grids), segments[i]) for i, images in seen.items()], np.int32),
    }


def first_fit_decreasing(
    lengths: Int32[np.ndarray, " n"], row_length: int
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """The row, the first place and the segment id (1.. within its row) of each length.

    A binary tree over the rows holds the most room below each node: the first row with enough is found in log2(n) steps.
    """
    n = len(lengths)
    rows, starts, segments = (np.zeros(n, np.int32) for _ in range(3))
    leaves = 1 << max(n - 1, 0).bit_length()
    room = [row_length] * (2 * leaves)  # node k has the children 2k and 2k + 1; row r is the leaf `leaves + r`
    held = [0] * leaves  # sequences in each row
    for i in np.argsort(-lengths, kind="stable").tolist():
        length, node = int(lengths[i]), 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        held[row] += 1
        rows[i], starts[i], segments[i] = row, row_length - room[node], held[row]
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows, starts, segments


def _within(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " tokens"]:
    """0 .. T-1 for each sequence, one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _places(rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, row_length: int) -> Int64[np.ndarray, " tokens"]:
    """Where each token lies in the flattened rows."""
    return np.repeat(rows.astype(np.int64) * row_length + starts, lengths) + _within(lengths)
