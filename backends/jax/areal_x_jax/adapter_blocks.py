"""Adapters cut into blocks of their columns: those of any rank have arrays of the same shape, so that they
share programs, and no rank is padded to another's."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 16  # columns


def count_blocks(rank: int) -> int:
    """Returns how many blocks an adapter of this rank has."""
    return -(-rank // BLOCK)


def rank_axis(name: str) -> int:
    """Returns the axis of a stack of kernels that is as long as the rank. name: of the kernels."""
    return 2 if name.endswith("_lora_a") else 1


def blocks_of(name: str, kernels: Float[Array, "layers _ _"]) -> Float[Array, "layers blocks _ _"]:
    """Returns an adapter's stack of kernels in blocks, with zeros after its rank."""
    axis, rank = rank_axis(name), kernels.shape[rank_axis(name)]
    sides = [(0, 0)] * 3
    sides[axis] = (0, -rank % BLOCK)
    whole = jnp.pad(kernels, sides)
    shape = (*whole.shape[:axis], count_blocks(rank), BLOCK, *whole.shape[axis + 1 :])
    return jnp.moveaxis(whole.reshape(shape), axis, 1)
