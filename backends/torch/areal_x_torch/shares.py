"""The division of a batch's packed rows among processes and micro-batches. numpy only: the driver of
a run on several processes divides its batches without torch.

All processes make the same micro-batches and the same passes through the model in the same order,
because they gather parameters together; those with fewer rows make up for it with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from areal_x.protocols.shares import Division, Purpose, blank_row
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch
from areal_x_torch.flat_rows import flatten_rows


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step, as every process has to know them."""

    sizes: Int[np.ndarray, "micro_batches shares"]
    """Rows of each share."""

    passes: tuple[int, ...]
    """Of each micro-batch, the passes of the process that makes most."""

    tokens: tuple[int, ...]
    """Of each, its tokens without padding."""

    trained: tuple[int, ...]
    """Of each, its masked tokens."""

    step_trained: int
    """Masked tokens of the whole batch, at least 1."""

    def cut(self, rows: Batch, share: int) -> Iterator[Batch]:
        """Yields the rows of each micro-batch, from all rows of this share: a blank one if it has
        none."""
        for start, stop in pairwise([0, *np.cumsum(self.sizes[:, share]).tolist()]):
            own = slice(start, stop)
            yield blank_row(rows) if start == stop else rows.map(lambda x, own=own: x[own])


def divide(config: TrainerConfig, batch: Batch, count: int, purpose: Purpose) -> Division:
    """See `areal_x.protocols.shares.SharingBackend`. For a step, the rows that hold a sequence are
    divided evenly among the fewest micro-batches of at most micro_batch_rows for each share, and
    then among the shares; for outputs, neighbouring rows have one share."""
    rows, segment_ids = batch.shape[0], np.asarray(batch.segment_ids)
    parents = None if batch.parents is None else np.asarray(batch.parents)
    budget = config.micro_batch_rows * batch.shape[1]

    def passes(shares: Sequence[np.ndarray]) -> int:
        """Returns the passes of the share that makes most. shares: the rows of each."""
        if count == 1:  # which counts its own anyway
            return 0
        of_each = (
            flatten_rows(segment_ids[own], budget, None if parents is None else parents[own])
            for own in shares
        )
        return max(map(len, of_each))

    if purpose == "outputs":
        share_of_row = np.arange(rows) * count // max(rows, 1)
        own = [np.flatnonzero(share_of_row == share) for share in range(count)]
        return Division(share_of_row, passes(own))
    mask = np.asarray(batch.mask)
    filled = np.flatnonzero(segment_ids.any(axis=1))
    most = config.micro_batch_rows * count
    groups = np.array_split(filled, -(-len(filled) // most)) if len(filled) else []
    divided = [np.array_split(group, count) for group in groups]
    share_of_row = np.full(rows, -1)
    for shares in divided:
        for share, own_rows in enumerate(shares):
            share_of_row[own_rows] = share
    return Division(
        share_of_row,
        MicroBatches(
            sizes=np.array([[len(own) for own in shares] for shares in divided], int).reshape(
                -1, count
            ),
            passes=tuple(map(passes, divided)),
            tokens=tuple(int(np.count_nonzero(segment_ids[group])) for group in groups),
            trained=tuple(int(np.count_nonzero(mask[group])) for group in groups),
            step_trained=max(int(np.sum(mask)), 1),
        ),
    )
