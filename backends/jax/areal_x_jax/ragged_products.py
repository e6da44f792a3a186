"""Products of groups of rows with a kernel each, as of a mixture's experts.

XLA has such a product for accelerators. On a CPU it multiplies every row with every kernel and
masks the results, so that 16 experts of which a token uses 4 cost four times as much as they must.
Here rows are divided into blocks of one group each, the last of a group filled up:

    rows of groups of 5, 0 and 3, blocks of 4:   a a a a | a · · · | c c c · | · · · ·

There are as many blocks as the groups could need at most, and a block is one product.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LARGEST = 128  # rows of a block: more are no faster, and fill up more


def ragged_dot(
    x: Float[Array, "n inputs"],
    kernels: Float[Array, "groups inputs outputs"],
    sizes: Int[Array, " groups"],
) -> Float[Array, "n outputs"]:
    """Returns what jax.lax.ragged_dot does: row i times the kernel of its group, and 0 for rows
    beyond all groups. sizes: rows of each group, in order."""
    if jax.default_backend() != "cpu":
        product: Array = jax.lax.ragged_dot(x, kernels, sizes)
        return product
    blocked: Array = by_blocks(x, kernels, sizes)
    return blocked


class Blocks(NamedTuple):
    """group: of each block. source: the row of each place of a block, for those that are filled.
    place: of each row in all blocks; of rows beyond all groups it is not filled, as there is always a
    place behind the last group's rows."""

    group: Int[Array, " blocks"]
    source: Int[Array, "blocks size"]
    filled: Bool[Array, "blocks size"]
    place: Int[Array, " n"]

    @staticmethod
    def of(rows: int, sizes: Int[Array, " groups"]) -> Blocks:
        groups = len(sizes)
        # A power of two, at most the mean of a group.
        size = min(LARGEST, max(1, 1 << (max(rows // groups, 1).bit_length() - 1)))
        count = min(rows, rows // size + groups)
        ends = jnp.cumsum(sizes)
        needed = -(-sizes // size)
        last = jnp.cumsum(needed)
        before = last - needed
        group = jnp.minimum(jnp.searchsorted(last, jnp.arange(count), side="right"), groups - 1)
        nth = (jnp.arange(count) - before[group])[:, None] * size + jnp.arange(size)
        own = jnp.minimum(jnp.searchsorted(ends, jnp.arange(rows), side="right"), groups - 1)
        return Blocks(
            group=group,
            source=jnp.clip((ends - sizes)[group][:, None] + nth, 0, rows - 1),
            filled=nth < sizes[group][:, None],
            place=before[own] * size + jnp.arange(rows) - (ends - sizes)[own],
        )

    def cut(self, x: Float[Array, "n features"]) -> Float[Array, "blocks size features"]:
        return jnp.where(self.filled[..., None], x[self.source], 0)

    def join(self, x: Float[Array, "blocks size features"]) -> Float[Array, "n features"]:
        return x.reshape(-1, x.shape[-1]).at[self.place].get(mode="clip")


@jax.custom_vjp
def by_blocks(
    x: Float[Array, "n inputs"],
    kernels: Float[Array, "groups inputs outputs"],
    sizes: Int[Array, " groups"],
) -> Float[Array, "n outputs"]:
    blocks = Blocks.of(len(x), sizes)
    return blocks.join(
        jax.lax.map(lambda of: of[0] @ kernels[of[1]], (blocks.cut(x), blocks.group))
    )


def _forward(x: Array, kernels: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return by_blocks(x, kernels, sizes), (x, kernels, sizes)


def _backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    x, kernels, sizes = saved
    blocks = Blocks.of(len(x), sizes)

    def one(of_kernels: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        rows, of_output, group = block
        return of_kernels.at[group].add(rows.T @ of_output), of_output @ kernels[group].T

    cut = blocks.cut(x), blocks.cut(gradient), blocks.group
    of_kernels, of_rows = jax.lax.scan(one, jnp.zeros_like(kernels), cut)
    return blocks.join(of_rows), of_kernels, None


by_blocks.defvjp(_forward, _backward)
