"""Adapters of the sequences that a sampler decodes together, each of which may have another one.

    columns of a kernel    │ a a a a │ b b 0 0 │ c c c c │ c c c 0 │    areal_x_jax.adapter_blocks
    blocks in a step       x A B of those whose rows run, one after another

An adapter has as many blocks as its rank needs, with zeros in its last one, of arrays whose length
grows in large steps: adapters come and go without a new program. A step multiplies all rows with each
block of the adapters that its rows have, and adds to each row what its own give. So the shapes of a
row's products do not depend on other adapters, and neither do their bits; and what is not finite in one
adapter stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.adapter_blocks import BLOCK, blocks_of, count_blocks, rank_axis
from areal_x_jax.architecture import Architecture
from areal_x_jax.leaf import local_name
from areal_x_jax.parameters import Params, adapter_leaves

LEAST_BLOCKS, GROWTH = 8, 4
HUGE = 1e30  # in place of what is not finite, for products with 0


class Running(NamedTuple):
    """The blocks of the adapters of some rows, and which rows have each."""

    blocks: Int[Array | np.ndarray, " most"]
    rows: Bool[Array | np.ndarray, "most rows"]

    number: Int[Array | np.ndarray, ""] | None
    """Of these blocks, one after another; None to compute the products with all blocks at once, which
    an accelerator does in less time."""


class SlotAdapters:
    """The adapters of a model's kernels, by name. An adapter has stacked kernels, with the scale in
    lora_b. one_by_one: see `Running.number`."""

    def __init__(self, arch: Architecture, kernels: Sequence[str], one_by_one: bool) -> None:
        self._arch = arch
        self._leaves = adapter_leaves(arch, kernels)
        self._one_by_one = one_by_one
        self._new: dict[str, Params] = {}  # not yet in the arrays
        self._blocks: dict[str, list[int]] = {}
        self._layers: list[Params] = []
        self._capacity = LEAST_BLOCKS
        self._write = jax.jit(self._written, donate_argnums=0)

    def put(self, name: str, adapter: Params) -> None:
        self.remove(name)
        self._new[name] = adapter

    def remove(self, name: str) -> None:
        """Forgets an adapter, which no sequence has."""
        self._new.pop(name, None)
        self._blocks.pop(name, None)

    def beside(self, params: Params, shapes: Params) -> Params:
        """Returns unstacked parameters with the blocks of all adapters. shapes: of an adapter's
        kernels, of any rank."""
        dtype = params["embed"].dtype
        if not self._layers:
            self._layers = [{} for _ in range(self._arch.layers)]
            for name, leaf in self._leaves.items():
                _, into, out = shapes[name].shape
                sides = (into, BLOCK) if rank_axis(name) == 2 else (BLOCK, out)
                for layer in self._arch.stacked(leaf.stack):
                    empty = jnp.zeros((self._capacity, *sides), dtype)
                    self._layers[layer][local_name(name)] = empty
        for name, adapter in self._new.items():
            self._blocks[name] = own = self._room(adapter)
            blocks = {
                leaf: self._blocks_of(leaf, adapter[leaf].astype(dtype))
                for leaf in self._leaves
                if leaf in adapter
            }
            self._layers = self._write(self._layers, blocks, np.array(own, np.int32))
        self._new = {}
        both = zip(params["layers"], self._layers, strict=True)
        return {**params, "layers": [layer | own for layer, own in both]}

    def _blocks_of(self, leaf: str, x: Array) -> Float[Array, "layers blocks _ _"]:
        """Returns an adapter's stack of kernels in blocks, finite ones if all are multiplied."""
        if not self._one_by_one:
            x = jnp.where(jnp.isfinite(x), x, HUGE)
        return blocks_of(leaf, x)

    def _room(self, adapter: Params) -> list[int]:
        """Returns blocks for an adapter that no other has; makes more if there are too few."""
        rank = next(x.shape[-1] for leaf, x in adapter.items() if leaf.endswith("_lora_a"))
        taken = {block for own in self._blocks.values() for block in own}
        count = count_blocks(rank)
        before = self._capacity
        while self._capacity < len(taken) + count:
            self._capacity *= GROWTH
        if more := self._capacity - before:
            self._layers = jax.tree.map(
                lambda x: jnp.pad(x, ((0, more), (0, 0), (0, 0))), self._layers
            )
        return [block for block in range(self._capacity) if block not in taken][:count]

    def _written(self, layers: list[Params], adapter: Params, own: Array) -> list[Params]:
        """Returns the blocks of all adapters with those of one; 0 for kernels that it lacks."""
        layers = [dict(layer) for layer in layers]
        for name, leaf in self._leaves.items():
            local = local_name(name)
            for index, layer in enumerate(self._arch.stacked(leaf.stack)):
                new = adapter[name][index] if name in adapter else 0.0
                layers[layer][local] = layers[layer][local].at[own].set(new)
        return layers

    def running(self, adapters: Sequence[str | None]) -> Running:
        """Returns the adapters of rows."""
        found = np.zeros(self._capacity, np.int32)
        rows = np.zeros((self._capacity, len(adapters)), bool)
        count = 0
        for name in dict.fromkeys(x for x in adapters if x is not None):
            for block in self._blocks[name]:
                found[count], rows[count] = block, [x == name for x in adapters]
                count += 1
        return Running(found, rows, np.int32(count) if self._one_by_one else None)


def with_running(params: Params, running: Running) -> Params:
    """Returns parameters for rows of which each has an adapter of its own."""
    return {**params, "running": running}


def add_products(
    y: Float[Array, "rows out"],
    x: Float[Array, "rows into"],
    a: Float[Array, "blocks into columns"],
    b: Float[Array, "blocks columns out"],
    running: Running,
) -> Float[Array, "rows out"]:
    """Returns y with x A B of the adapter of each row added."""
    if running.number is None:
        own = jnp.zeros(running.rows.shape, bool).at[running.blocks].max(running.rows)
        inner = jnp.where(own.T[..., None], jnp.einsum("ri,kic->rkc", x, a), 0)
        return y + jnp.einsum("rkc,kco->ro", inner, b)

    def one(index: Array, y: Array) -> Array:
        block = running.blocks[index]
        return jnp.where(running.rows[index][:, None], y + x @ a[block] @ b[block], y)

    return jax.lax.fori_loop(0, running.number, one, y)
