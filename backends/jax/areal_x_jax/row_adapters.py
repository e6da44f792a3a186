"""Adapters of the rows of a batch, of which several train at once (areal_x_jax.bank).

    blocks of columns    a | b b | c         b has the rank of two (areal_x_jax.adapter_blocks)
    the rows of each     0 | 1 1 | 2, 3      of the batch

One batched product multiplies each block with the rows of its adapter. Rows are gathered for it, and not
matrices, which are larger. An adapter with more rows than the mean has its blocks several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int


class RowBlocks(NamedTuple):
    """Which rows are multiplied with which blocks, in units of as many rows."""

    rows: Int[Array | np.ndarray, "units most"]
    """As many as the batch has for none."""

    blocks: Int[Array | np.ndarray, " units"] | None
    """None if unit i has block i."""

    @staticmethod
    def of(
        rows_of: Sequence[Int[np.ndarray, " rows"]], counts: Sequence[int], none: int
    ) -> RowBlocks:
        """rows_of, counts: each adapter's rows, and its blocks, which follow those of the one before.
        The numbers of units and their rows are powers of two, so that batches share programs."""
        most = power(-(-sum(map(len, rows_of)) // len(rows_of)))
        units: list[np.ndarray] = []
        blocks: list[int] = []
        first = 0
        for rows, count in zip(rows_of, counts, strict=True):
            for block in range(first, first + count):
                for start in range(0, len(rows), most):
                    units.append(rows[start : start + most])
                    blocks.append(block)
            first += count
        found = np.full((power(len(units)), most), none, np.int32)
        for row, own in zip(found, units, strict=False):
            row[: len(own)] = own
        if len(units) == first:
            return RowBlocks(found, None)
        return RowBlocks(found, np.array(blocks + [0] * (len(found) - len(units)), np.int32))


def power(count: int) -> int:
    """Returns the least power of two that is not less."""
    return 1 << (count - 1).bit_length()


def add_products(
    y: Float[Array, "rows length out"],
    x: Float[Array, "rows length into"],
    a: Float[Array, "blocks into columns"],
    b: Float[Array, "blocks columns out"],
    given: RowBlocks,
) -> Float[Array, "rows length out"]:
    """Returns y with x A B of the adapter of each row added."""
    units, most = given.rows.shape
    rows, length = given.rows.reshape(-1), x.shape[1]
    own = x.at[rows].get(mode="fill", fill_value=0).reshape(units, most * length, -1)
    if given.blocks is not None:
        a, b = a[given.blocks], b[given.blocks]
    inner = (own @ a @ b).reshape(units * most, length, -1)
    return y.at[rows].add(inner, mode="drop")
