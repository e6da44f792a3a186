"""The host's part of vision-language models: where the patches of a batch's images are, and where
the images are in its text.

An image is given by its grid (frames, height, width) in patches, as Hugging Face's processors
return it (image_grid_thw).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from areal_x.errors import UserError
from areal_x.hf.image_positions import (
    TEXT_ONLY,
    Grid,
    batch_images,
    check_grids,
    count_patches,
    image_tokens,
    mrope_positions,
)
from areal_x.types import Batch
from areal_x_jax.vision import ImageArrays, PatchLayout
from areal_x_jax.vision_architecture import VisionArchitecture


def image_arrays(
    batch: Batch, arch: VisionArchitecture | None, most: int = 0
) -> ImageArrays | None:
    """Returns the arrays that the step reads of the images of rows; None without images. arch: of
    the model's tower, None for a text-only model. most: patches of the row of the whole batch that
    has most.

    Every row has room for as many patches as that one needs, rounded up to merge² · 2^n, so that
    few programs are compiled.

    Raises: UserError for a text-only model, for another tower's patches, and if the image tokens of
    a sequence do not match its images.
    """
    if arch is None:
        if not batch.has_images:
            return None
        raise UserError(TEXT_ONLY)
    of_image = image_tokens(batch.tokens, arch.image_token, batch.mask) & (batch.segment_ids > 0)
    if not batch.has_images:
        if of_image.any():
            raise UserError(
                f"a sequence has {of_image.sum()} image tokens and no image: give its trajectory"
                " `images`"
            )
        return None
    given, given_grids, image_segments = batch_images(batch)
    arch.form.check(given.shape[2], given_grids[image_segments > 0])
    grids = [
        [(t, h, w) for t, h, w in own[there].tolist()]
        for own, there in zip(given_grids, image_segments > 0, strict=True)
    ]
    capacity = padded_patches(max(most, *map(count_patches, grids)), arch.merge)
    layouts = [patch_layout(own, arch, capacity) for own in grids]
    patches = np.zeros((len(grids), capacity, arch.in_features), np.float32)
    width = min(capacity, given.shape[1])
    patches[:, :width] = given[:, :width]
    layout = PatchLayout(
        *(
            None if of_rows[0] is None else np.stack(of_rows)
            for of_rows in zip(*layouts, strict=True)
        )
    )
    places = image_places(of_image)
    if arch.form.directed:
        return ImageArrays(patches, layout, places, positions_of(batch, of_image, grids, arch))
    blocks = blocks_of(batch, of_image, grids, arch)  # which also refuses images of other tokens
    return ImageArrays(patches, layout, places, blocks=blocks if arch.form.whole else None)


def positions_of(
    batch: Batch,
    of_image: Bool[np.ndarray, "rows length"],
    grids: Sequence[Sequence[Grid]],
    arch: VisionArchitecture,
) -> Int[np.ndarray, "rows 3 length"]:
    """Returns the `mrope_positions` of each sequence of packed rows whose images have these grids,
    row by row."""
    positions = np.repeat(np.asarray(batch.positions, np.int32)[:, None], 3, axis=1)
    for row, here, theirs in _with_images(batch, of_image, grids):
        of_segment = mrope_positions(
            batch.tokens[row, here],
            theirs,
            arch.image_token,
            arch.merge,
            batch.mask[row, here],
        )
        positions[row][:, here] = of_segment
    return positions


def blocks_of(
    batch: Batch,
    of_image: Bool[np.ndarray, "rows length"],
    grids: Sequence[Sequence[Grid]],
    arch: VisionArchitecture,
) -> Int[np.ndarray, "rows length"]:
    """Returns for each token of packed rows whose images have these grids the number of its image in
    the row, from 1 on; 0 for text."""
    blocks = np.zeros(batch.shape, np.int32)
    for row, here, theirs in _with_images(batch, of_image, grids):
        spans = arch.form.spans(batch.tokens[row, here], theirs, batch.mask[row, here])
        first, places = blocks[row].max() + 1, np.flatnonzero(here)
        for number, (start, stop) in enumerate(spans, first):
            blocks[row, places[start:stop]] = number
    return blocks


def _with_images(
    batch: Batch, of_image: Bool[np.ndarray, "rows length"], grids: Sequence[Sequence[Grid]]
) -> Iterator[tuple[int, Bool[np.ndarray, " length"], list[Grid]]]:
    """Yields the sequences of packed rows that have images, or tokens of images: their row, which of its
    tokens are theirs, and the grids of their images."""
    _, _, image_segments = batch_images(batch)
    for row, (segment_ids, own) in enumerate(zip(batch.segment_ids, grids, strict=True)):
        owners = image_segments[row][image_segments[row] > 0]
        for segment in np.union1d(owners, segment_ids[of_image[row]]):
            theirs = [grid for grid, owner in zip(own, owners, strict=True) if owner == segment]
            yield row, segment_ids == segment, theirs


def patch_layout(
    grids: Sequence[Grid], arch: VisionArchitecture, capacity: int | None = None
) -> PatchLayout:
    """Returns the positions of all patches of these images, padded to the capacity, by default the
    least merge² · 2^n patches that hold them, so that few programs are compiled.

    Raises: UserError for grids that do not divide into the merger's squares, or do not fit.
    """
    merge = arch.merge
    check_grids(grids, merge)
    patches = count_patches(grids)
    if capacity is None:
        capacity = padded_patches(patches, merge)
    if patches > capacity or capacity % merge**2:
        raise UserError(
            f"{patches} patches need a capacity of as many, and a multiple of {merge**2}, not"
            f" {capacity}"
        )
    frames, windows, rows, columns = np.zeros((4, capacity), np.int32)
    corners, weights = np.zeros((capacity, 4), np.int32), np.zeros((capacity, 4), np.float32)
    start = 0
    for count, height, width in grids:
        here = slice(start, start + count * height * width)
        row, column = (np.tile(axis, count) for axis in merge_order(height, width, merge))
        frame = np.repeat(np.arange(count), height * width)
        rows[here], columns[here] = row, column
        frames[here] = frames.max() + 1 + frame
        if arch.window:
            down, across = -(-height // arch.window), -(-width // arch.window)
            windows[here] = (
                windows.max()
                + 1
                + (frame * down + row // arch.window) * across
                + column // arch.window
            )
        if arch.table:
            corners[here], weights[here] = interpolation(row, height, column, width, arch.table)
        start = here.stop
    of_table = (corners, weights) if arch.table else (None, None)
    return PatchLayout(frames, windows if arch.window else None, rows, columns, *of_table)


def padded_patches(patches: int, merge: int) -> int:
    """Returns the least merge² · 2^n that is at least `patches`."""
    return merge**2 << max(-(-patches // merge**2) - 1, 0).bit_length()


def merge_order(height: int, width: int, merge: int) -> Int[np.ndarray, "2 patches"]:
    """Returns row and column of each patch of a frame, square after square of merge² patches."""
    squares = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    return squares.swapaxes(2, 3).reshape(2, -1)


def interpolation(
    row: Int[np.ndarray, " patches"],
    height: int,
    column: Int[np.ndarray, " patches"],
    width: int,
    side: int,
) -> tuple[Int[np.ndarray, "patches 4"], Float[np.ndarray, "patches 4"]]:
    """Returns indices and weights that interpolate a table [side², …] bilinearly, its corners at
    the frame's. In fp32, like Hugging Face."""

    def along(index: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(at).astype(np.int32)
        return np.stack([low, np.minimum(low + 1, side - 1)], axis=-1), np.stack(
            [1 - (at - low), at - low], axis=-1
        )

    (rows, of_rows), (columns, of_columns) = along(row, height), along(column, width)
    indices = rows[:, :, None] * side + columns[:, None, :]
    return indices.reshape(-1, 4), (of_rows[:, :, None] * of_columns[:, None, :]).reshape(-1, 4)


def image_places(of_image: Bool[np.ndarray, "rows length"]) -> Int[np.ndarray, "rows length"]:
    """Returns for each token the index of its image embedding in the row, or −1 for text."""
    return np.where(of_image, np.cumsum(of_image, axis=-1, dtype=np.int32) - 1, np.int32(-1))
