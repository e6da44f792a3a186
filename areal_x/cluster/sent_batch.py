"""A batch on its way to the processes that train: with one copy of each of its images, of which the rows
of a batch have as many as the attempts of their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

from areal_x.hf.image_positions import batch_images
from areal_x.protocols.shares import own_rows
from areal_x.runtime.distinct_images import DistinctImages, Numbers
from areal_x.types import Batch, Images


@dataclass(frozen=True)
class SentBatch:
    """Rows of a batch, without the patches of their images."""

    rows: Batch
    """With `patches` of None."""

    room: tuple[int, int]
    """Patches of a row, with padding, and the features of each."""

    numbers: tuple[Numbers, ...]
    """Of each row's images, in their order."""

    patches: Mapping[int, Float32[np.ndarray, "patches features"]]
    """Of each image by its number. What several `SentBatch`es of one message have is in it once, as they
    are the same objects."""

    @staticmethod
    def of(batch: Batch) -> SentBatch:
        """batch: with images."""
        given, grids, image_segments = batch_images(batch)
        distinct, numbers = DistinctImages(), []
        for patches, of_row, segments in zip(given, grids, image_segments, strict=True):
            own = of_row[segments > 0]
            count = int(np.prod(own, axis=1, dtype=np.int64).sum())
            numbers.append(distinct.add(Images(patches[:count], own)) if len(own) else ())
        return SentBatch(
            rows=batch.replace(patches=None),
            room=(given.shape[1], given.shape[2]),
            numbers=tuple(numbers),
            patches={number: image.patches for number, image in enumerate(distinct.images)},
        )

    def take(self, rows: Int[np.ndarray, " n"]) -> SentBatch:
        """Returns these rows, with the images that they have."""
        numbers = tuple(self.numbers[row] for row in rows.tolist())
        own = {number: self.patches[number] for of_row in numbers for number in of_row}
        return SentBatch(own_rows(self.rows, rows), self.room, numbers, own)

    def restored(self) -> Batch:
        """Returns the rows as they were."""
        patches = np.zeros((len(self.numbers), *self.room), np.float32)
        for row, own in zip(patches, self.numbers, strict=True):
            if own:
                images = np.concatenate([self.patches[number] for number in own])
                row[: len(images)] = images
        return self.rows.replace(patches=patches)


def sendable(batch: Batch) -> Batch | SentBatch:
    """Returns a batch as it travels."""
    return SentBatch.of(batch) if batch.has_images else batch


def taken(batch: Batch | SentBatch, rows: Int[np.ndarray, " n"]) -> Batch | SentBatch:
    """Returns these rows of a batch on its way."""
    return batch.take(rows) if isinstance(batch, SentBatch) else own_rows(batch, rows)


def arrived(batch: Batch | SentBatch) -> Batch:
    """Returns a batch for a trainer."""
    return batch.restored() if isinstance(batch, SentBatch) else batch
