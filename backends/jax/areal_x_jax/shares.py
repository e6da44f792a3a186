"""The division of a batch's packed rows among devices.

A step has the rows as [micro-batches, rows at once, length], the second axis sharded over the mesh's
ROW_AXES: each share is the block of rows that one place along them has in every micro-batch. The
rows of some shares, in their order in the batch, lie in the same way in an array that has their
blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from areal_x.protocols.shares import Division, Purpose, Shares
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch
from areal_x_jax.sharding import ROW_AXES, RULES, Partitioner


@dataclass(frozen=True)
class WholeBatch:
    """What every process has to know of a batch."""

    rows: int

    trained: int
    """Masked tokens, at least 1."""

    patches: int
    """Patches of the images of the row that has most."""


def divide(config: TrainerConfig, batch: Batch, count: int, purpose: Purpose) -> Division:
    """See `areal_x.protocols.shares.SharingBackend`."""
    rows = batch.shape[0]
    patches = 0
    if batch.has_images:
        grids, of_rows = np.asarray(batch.grids), np.asarray(batch.image_segments) > 0
        patches = int((grids.prod(axis=2) * of_rows).sum(axis=1).max(initial=0))
    trained = max(int(np.count_nonzero(batch.mask)), 1)
    return Division(
        np.arange(rows) // config.micro_batch_rows % count, WholeBatch(rows, trained, patches)
    )


def shares_of(partitioner: Partitioner) -> Shares:
    """Returns the shares of the rows that this process's devices have."""
    assert partitioner.mesh is not None
    count = partitioner.size(*ROW_AXES)
    by_row = NamedSharding(partitioner.mesh, PartitionSpec(RULES["rows"]))
    blocks = by_row.addressable_devices_indices_map((count,)).values()
    own = {share for (block,) in blocks for share in range(*block.indices(count))}
    return Shares(tuple(sorted(own)), count)


def put_shares(x: np.ndarray, sharding: NamedSharding, shares: Shares, at_once: int) -> Array:
    """Puts rows on this process's devices. x: [micro-batches, …], the blocks of its own shares.
    at_once: rows of a micro-batch in all shares."""
    block = at_once // shares.count
    start_of = {share: block * index for index, share in enumerate(shares.own)}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[1].indices(at_once)
        here = start_of[start // block]
        return x[(index[0], slice(here, here + stop - start), *index[2:])]

    return jax.make_array_from_callback((x.shape[0], at_once, *x.shape[2:]), sharding, part)


def own_blocks(x: Array, shares: Shares) -> np.ndarray:
    """Returns the blocks of this process's shares of an array [micro-batches, rows at once, length]
    that is sharded by rows alone."""
    block = x.shape[1] // shares.count
    found = np.empty((x.shape[0], block * len(shares.own), *x.shape[2:]), x.dtype)
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[1].indices(x.shape[1])
        here = block * shares.own.index(start // block)
        found[:, here : here + stop - start] = np.asarray(shard.data)
    return found
