"""Packs sequences into rows of a fixed length by first-fit decreasing, and maps values of sequences
or tokens to the same positions and back.

A sequence is never cut. Those that begin with the same tokens may share one copy of them
(areal_x.batching.sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Int64

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.batching.sharing import Placement, place_shared
from areal_x.errors import UserError, positive
from areal_x.types import NOT_RECORDED, NOT_THE_POLICY, Batch, Kept, Trajectory


@dataclass(frozen=True)
class Packed:
    """A batch of rows, and the positions of the n trajectories in it.

    With `places`, token t of trajectory i is in row `rows[i]`, in a column of `columns`; unless it
    shares tokens, in `starts[i] + t`. Its segment id is `segments[i]`. A token that several
    trajectories share has the id, mask and values of its owner (`Placement.owned`).

    The batch has tokens, segment_ids, positions, mask, behavior_logp and versions; parents if sharing
    was requested; and experts, kept and the image arrays if a trajectory has any. Everything else is
    None.
    """

    batch: Batch
    lengths: Int32[np.ndarray, " n"]
    places: Placement

    def spread(self, values: Float32[np.ndarray, " n"]) -> Float32[np.ndarray, "rows length"]:
        """Returns rows with each trajectory's value at all tokens that it owns, 0 in padding."""
        return self._scatter(np.repeat(np.asarray(values, np.float32), self.lengths))

    def spread_tokens(
        self, values: Sequence[Float32[np.ndarray, " T"]]
    ) -> Float32[np.ndarray, "rows length"]:
        """Returns rows with each trajectory's array, one value a token, at the tokens that it owns; 0
        in padding."""
        if [len(v) for v in values] != self.lengths.tolist():
            raise ValueError(
                f"expected one value for each token of {len(self.lengths)} trajectories"
            )
        return self._scatter(np.concatenate([np.zeros(0, np.float32), *values]).astype(np.float32))

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        """Splits `[rows, length]` into one array a trajectory, in the order of `pack`'s argument: the
        inverse of `spread_tokens`, but that a shared token has its owner's value."""
        if not len(self.lengths):
            return []
        return np.split(x.reshape(-1)[self._positions()], np.cumsum(self.lengths)[:-1])

    def _scatter(
        self, values: Float32[np.ndarray, " tokens"]
    ) -> Float32[np.ndarray, "rows length"]:
        out = np.zeros(self.batch.shape, np.float32)
        owned = self.places.owned
        out.reshape(-1)[self._positions()[owned]] = values[owned]
        return out

    def _positions(self) -> Int64[np.ndarray, " tokens"]:
        return _flat_positions(self.places, self.lengths, self.batch.shape[1])


def pack(
    trajectories: Sequence[Trajectory],
    row_length: int,
    rows_multiple: int = 1,
    together: int = 1,
    groups: Sequence[int] | None = None,
) -> Packed:
    """Packs whole trajectories into rows `[rows, row_length]`; always at least one row.

    Without groups, which lengths share a row depends on the lengths alone; equal lengths keep their
    order.

    rows_multiple: empty rows are added up to a multiple of this. together: this many consecutive
    trajectories stay adjacent in a row (2: pairs, with the segment ids 2k - 1 and 2k). groups: the
    group of each trajectory; those of a group share the tokens that they begin with, one copy a row,
    where that saves rows or tokens.

    Raises: UserError for trajectories longer than a row, naming the setting to raise.
    """
    positive("train.row_length", row_length)
    lengths = np.array([len(t) for t in trajectories], np.int32)
    if len(lengths) and lengths.min() == 0:
        raise ValueError(f"trajectory {lengths.argmin()} has no tokens")
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} trajectories do not make whole sets of {together}")
    if groups is not None and together > 1:
        raise ValueError("trajectories that stay together cannot share tokens")
    totals = lengths.reshape(-1, together).sum(1, dtype=np.int32)
    if len(totals) and totals.max() > row_length:
        what = "a sequence" if together == 1 else f"a set of {together} sequences"
        raise UserError(
            f"{what} of {totals.max()} tokens does not fit into a row of {row_length}, and"
            f" sequences are never cut: raise train.row_length to at least {totals.max()}, or lower"
            " sampling.max_tokens"
        )
    places = (
        place_unshared(lengths, row_length, together)
        if groups is None
        else place_shared(trajectories, groups, row_length)
    )
    used = int(places.rows.max(initial=0)) + 1
    shape = (-(-used // rows_multiple) * rows_multiple, row_length)
    at = _flat_positions(places, lengths, row_length)
    within = _within(lengths)
    owned = places.owned

    def filled(values: Sequence[np.ndarray], dtype: Any, padding: float = 0) -> np.ndarray:
        each = values[0].shape[1:] if len(values) else ()
        out = np.full((*shape, *each), padding, dtype)
        if len(values):
            out.reshape(-1, *each)[at[owned]] = np.concatenate(values)[owned]
        return out

    experts = recorded_experts(trajectories)
    before = np.where(within > 0, np.roll(places.columns, 1), -1)
    batch = Batch(
        tokens=filled([t.tokens for t in trajectories], np.int32),
        segment_ids=filled([np.repeat(places.segments, lengths)], np.int32),
        positions=filled([within], np.int32),
        mask=filled([t.mask for t in trajectories], np.bool_),
        behavior_logp=filled([t.logprobs for t in trajectories], np.float32),
        versions=filled([t.versions for t in trajectories], np.int32, padding=NOT_THE_POLICY),
        experts=filled(experts, np.int16, padding=NOT_RECORDED) if experts else None,
        kept=kept_pairs(trajectories, at, shape, owned),
        parents=None if groups is None else filled([before], np.int32, padding=-1),
        **image_arrays(trajectories, places, rows=shape[0]),
    )
    return Packed(batch, lengths, places)


def place_unshared(
    lengths: Int32[np.ndarray, " n"], row_length: int, together: int = 1
) -> Placement:
    """Places sequences, or sets of adjacent ones, by first-fit decreasing; nothing is shared."""
    sets = lengths.reshape(-1, together)
    rows, starts, segments = (
        np.repeat(x, together)
        for x in first_fit_decreasing(sets.sum(1, dtype=np.int32), row_length)
    )
    starts += (np.cumsum(sets, axis=1, dtype=np.int32) - sets).reshape(-1)
    segments = (segments - 1) * together + np.tile(
        np.arange(1, together + 1, dtype=np.int32), len(sets)
    )
    columns = (np.repeat(starts, lengths) + _within(lengths)).astype(np.int32)
    return Placement(rows, starts, segments, columns, np.ones(len(columns), np.bool_))


def recorded_experts(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The recorded experts of each trajectory, -1 for one without; empty if none has any."""
    recorded = [t.experts for t in trajectories if t.experts is not None]
    if len({x.shape[1:] for x in recorded}) > 1:
        raise ValueError("trajectories with experts of different models cannot share a batch")
    if not recorded:
        return []
    nothing = np.full((1, *recorded[0].shape[1:]), NOT_RECORDED, np.int16)
    return [
        np.repeat(nothing, len(t), axis=0) if t.experts is None else t.experts for t in trajectories
    ]


def kept_pairs(
    trajectories: Sequence[Trajectory],
    at: Int64[np.ndarray, " tokens"],
    shape: tuple[int, int],
    owned: Bool[np.ndarray, " tokens"],
) -> Int32[np.ndarray, "rows most 2"] | None:
    """Returns `Batch.kept` for rows of this shape; None if no trajectory was sampled from a
    truncated distribution. at: the index of each token of the trajectories in the flattened rows.
    owned: see `Placement`.

    `most` is a power of two, so that a compiled step is not compiled anew for each batch.
    """
    if all(t.kept is None for t in trajectories):
        return None
    kept = Kept.joined([t.kept or Kept.everything(len(t)) for t in trajectories])
    own = np.repeat(owned, kept.counts)
    rows, columns = np.divmod(np.repeat(at, kept.counts)[own], shape[1])
    order = np.argsort(rows, kind="stable")
    in_row = np.bincount(rows, minlength=shape[0])
    most = 1 << int(max(in_row.max(), 1) - 1).bit_length()
    pairs = np.full((shape[0], most, 2), -1, np.int32)
    pairs[rows[order], _within(in_row)] = np.stack([columns, kept.ids[own]], axis=1)[order]
    return pairs


def image_arrays(
    trajectories: Sequence[Trajectory], places: Placement, rows: int
) -> dict[str, np.ndarray]:
    """The image arrays of a batch of `rows` rows, those of a row in the order of its tokens; empty
    if there are no images.

    Raises: UserError for patches of different models' processors.
    """
    in_order = (
        (i, trajectories[i].images) for i in np.lexsort((places.starts, places.rows)).tolist()
    )
    seen = {i: images for i, images in in_order if images is not None and len(images.grids)}
    if not seen:
        return {}
    if len(widths := {images.patches.shape[1] for images in seen.values()}) > 1:
        raise UserError(
            f"patches of {sorted(widths)} features cannot share a batch: they come from different"
            " models' processors"
        )
    row_of = places.rows[list(seen)]

    def filled(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        lengths = np.bincount(row_of, [len(x) for x in values], rows).astype(np.int64)
        out = np.zeros((rows, lengths.max(), *values[0].shape[1:]), dtype)
        out[np.repeat(np.arange(rows), lengths), _within(lengths)] = np.concatenate(values)
        return out

    return {
        "patches": filled([images.patches for images in seen.values()], np.float32),
        "grids": filled([images.grids for images in seen.values()], np.int32),
        "image_segments": filled(
            [np.full(len(images.grids), places.segments[i]) for i, images in seen.items()],
            np.int32,
        ),
    }


def _within(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " tokens"]:
    """Each token's index in its sequence: 0 .. T-1 for each sequence, concatenated."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _flat_positions(
    places: Placement, lengths: Int32[np.ndarray, " n"], row_length: int
) -> Int64[np.ndarray, " tokens"]:
    """Each token's index in the flattened rows."""
    return np.repeat(places.rows.astype(np.int64) * row_length, lengths) + places.columns
