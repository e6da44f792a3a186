"""Sequences into rows of a fixed length, by first-fit decreasing; and values of sequences or tokens
into the same places.

A sequence is never cut. Those that begin alike may lie beside one copy of what they share
(areal_x.batching.sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.batching.sharing import Places, shared_places
from areal_x.errors import UserError, positive
from areal_x.types import NOT_RECORDED, NOT_THE_POLICY, Batch, Trajectory


@dataclass(frozen=True)
class Packed:
    """A batch of rows, and where in it each of the n trajectories lies.

    Trajectory i holds the places `starts[i] : starts[i] + lengths[i] - shared[i]` of row `rows[i]`,
    under the segment id `segments[i]`; before those come the `shared[i]` tokens from
    `shared_starts[i]` on, which other trajectories begin with too. In the batch tokens,
    segment_ids, positions, mask, behavior_logp and versions are filled; prefix_ids where sharing
    was asked for; and, if a trajectory has any, experts and what speaks of images. Everything else
    is None.
    """

    batch: Batch
    rows: Int32[np.ndarray, " n"]
    starts: Int32[np.ndarray, " n"]
    lengths: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    shared: Int32[np.ndarray, " n"]
    shared_starts: Int32[np.ndarray, " n"]

    def spread(self, values: Float32[np.ndarray, " n"]) -> Float32[np.ndarray, "rows length"]:
        """Each trajectory's value at all tokens that are its own, 0 at shared ones and in
        padding."""
        own = _within(self.lengths) >= np.repeat(self.shared, self.lengths)
        return self._scatter(
            np.where(own, np.repeat(np.asarray(values, np.float32), self.lengths), 0)
        )

    def spread_tokens(
        self, values: Sequence[Float32[np.ndarray, " T"]]
    ) -> Float32[np.ndarray, "rows length"]:
        """Each trajectory's array, one value a token, where its tokens lie; 0 in padding. Of a
        shared token the last one's."""
        if [len(v) for v in values] != self.lengths.tolist():
            raise ValueError(
                f"expected one value for each token of {len(self.lengths)} trajectories"
            )
        return self._scatter(np.concatenate([np.zeros(0, np.float32), *values]).astype(np.float32))

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        """The inverse of `spread_tokens`: from `[rows, length]` one array a trajectory, in the
        order they were given."""
        return (
            np.split(x.reshape(-1)[self._places()], np.cumsum(self.lengths)[:-1])
            if len(self.lengths)
            else []
        )

    def _scatter(
        self, values: Float32[np.ndarray, " tokens"]
    ) -> Float32[np.ndarray, "rows length"]:
        out = np.zeros(self.batch.shape, np.float32)
        out.reshape(-1)[self._places()] = values
        return out

    def _places(self) -> Int64[np.ndarray, " tokens"]:
        return _places(
            self.rows,
            self.starts,
            self.lengths,
            self.batch.shape[1],
            self.shared,
            self.shared_starts,
        )


def pack(
    trajectories: Sequence[Trajectory],
    row_length: int,
    rows_multiple: int = 1,
    together: int = 1,
    groups: Sequence[int] | None = None,
) -> Packed:
    """Packs whole trajectories into rows `[rows, row_length]`; empty rows fill up to a multiple of
    `rows_multiple`.

    There is always a row. Which lengths share one depends on the lengths alone; equal lengths keep
    the order they came in. together: so many that follow each other stay neighbours in one row (2:
    pairs, with the segment ids 2k - 1 and 2k). groups: whose each trajectory is; those of a group
    share what they begin with, where that is worth it, one copy a row. Raises: UserError for
    trajectories longer than a row, naming the setting to raise.
    """
    positive("train.row_length", row_length)
    lengths = np.array([len(t) for t in trajectories], np.int32)
    if len(lengths) and lengths.min() == 0:
        raise ValueError(f"trajectory {lengths.argmin()} has no tokens")
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} trajectories do not make whole sets of {together}")
    if groups is not None and together > 1:
        raise ValueError("trajectories that stay together cannot share what they begin with")
    totals = lengths.reshape(-1, together).sum(1, dtype=np.int32)
    if len(totals) and totals.max() > row_length:
        what = "a sequence" if together == 1 else f"a set of {together} sequences"
        raise UserError(
            f"{what} of {totals.max()} tokens does not fit into a row of {row_length}, and"
            f" sequences are never cut: raise train.row_length to at least {totals.max()}, or lower"
            " sampling.max_tokens"
        )
    places = (
        whole_places(lengths, row_length, together)
        if groups is None
        else shared_places(trajectories, groups, row_length)
    )
    used = int(places.rows.max(initial=0)) + 1
    shape = (-(-used // rows_multiple) * rows_multiple, row_length)
    at = _places(
        places.rows, places.starts, lengths, row_length, places.shared, places.shared_starts
    )
    within = _within(lengths)
    is_shared = within < np.repeat(places.shared, lengths)
    own_segment, shared_segment = (
        np.repeat(x, lengths) for x in (places.segments, places.shared_segments)
    )

    def filled(values: Sequence[np.ndarray], dtype: Any, padding: float = 0) -> np.ndarray:
        each = values[0].shape[1:] if len(values) else ()
        out = np.full((*shape, *each), padding, dtype)
        if len(values):
            out.reshape(-1, *each)[at] = np.concatenate(values)
        return out

    experts = experts_of(trajectories)
    batch = Batch(
        tokens=filled([t.tokens for t in trajectories], np.int32),
        segment_ids=filled([np.where(is_shared, shared_segment, own_segment)], np.int32),
        positions=filled([within], np.int32),
        mask=filled([t.mask for t in trajectories], np.bool_),
        behavior_logp=filled([t.logprobs for t in trajectories], np.float32),
        versions=filled([t.versions for t in trajectories], np.int32, padding=NOT_THE_POLICY),
        experts=filled(experts, np.int16, padding=NOT_RECORDED) if experts else None,
        prefix_ids=(
            None if groups is None else filled([np.where(is_shared, 0, shared_segment)], np.int32)
        ),
        **images_of_rows(trajectories, places.rows, places.starts, places.segments, shape[0]),
    )
    return Packed(
        batch,
        places.rows,
        places.starts,
        lengths,
        places.segments,
        places.shared,
        places.shared_starts,
    )


def whole_places(lengths: Int32[np.ndarray, " n"], row_length: int, together: int = 1) -> Places:
    """Sequences, or sets of neighbours, by first-fit decreasing; nothing is shared."""
    sets = lengths.reshape(-1, together)
    rows, starts, segments = (
        np.repeat(x, together)
        for x in first_fit_decreasing(sets.sum(1, dtype=np.int32), row_length)
    )
    starts += (np.cumsum(sets, axis=1, dtype=np.int32) - sets).reshape(-1)
    segments = (segments - 1) * together + np.tile(
        np.arange(1, together + 1, dtype=np.int32), len(sets)
    )
    return Places(rows, starts, segments, *(np.zeros_like(lengths) for _ in range(3)))


def experts_of(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The recorded experts of each, -1 of those without; empty where none has any."""
    recorded = [t.experts for t in trajectories if t.experts is not None]
    if len({x.shape[1:] for x in recorded}) > 1:
        raise ValueError("trajectories with experts of different models cannot share a batch")
    if not recorded:
        return []
    nothing = np.full((1, *recorded[0].shape[1:]), NOT_RECORDED, np.int16)
    return [
        np.repeat(nothing, len(t), axis=0) if t.experts is None else t.experts for t in trajectories
    ]


def images_of_rows(
    trajectories: Sequence[Trajectory],
    rows: Int32[np.ndarray, " n"],
    starts: Int32[np.ndarray, " n"],
    segments: Int32[np.ndarray, " n"],
    count: int,
) -> dict[str, np.ndarray]:
    """What a batch of `count` rows says of images, those of a row in the order of its tokens;
    nothing where there are none."""
    in_order = ((i, trajectories[i].images) for i in np.lexsort((starts, rows)).tolist())
    seen = {i: images for i, images in in_order if images is not None and len(images.grids)}
    if not seen:
        return {}
    if len(widths := {images.patches.shape[1] for images in seen.values()}) > 1:
        raise UserError(
            f"patches of {sorted(widths)} features cannot share a batch: they are of different"
            " models' processors"
        )

    def filled(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        lengths = np.bincount(rows[list(seen)], [len(x) for x in values], count).astype(np.int64)
        out = np.zeros((count, lengths.max(), *values[0].shape[1:]), dtype)
        out[np.repeat(np.arange(count), lengths), _within(lengths)] = np.concatenate(values)
        return out

    return {
        "patches": filled([images.patches for images in seen.values()], np.float32),
        "grids": filled([images.grids for images in seen.values()], np.int32),
        "image_segments": filled(
            [np.full(len(images.grids), segments[i]) for i, images in seen.items()], np.int32
        ),
    }


def _within(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " tokens"]:
    """0 .. T-1 for each sequence, one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _places(
    rows: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    row_length: int,
    shared: np.ndarray,
    shared_starts: np.ndarray,
) -> Int64[np.ndarray, " tokens"]:
    """Where each token lies in the flattened rows."""
    within, begins = _within(lengths), rows.astype(np.int64) * row_length
    own = np.repeat(begins + starts - shared, lengths)
    return within + np.where(
        within < np.repeat(shared, lengths), np.repeat(begins + shared_starts, lengths), own
    )
