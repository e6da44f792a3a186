"""Adapters of the sequences that a sampler decodes together, each of which may have another one.

The matrices of all adapters are side by side in each layer: x · A is computed for the columns of all,
each row keeps those of its own (the others' are multiplied by 0), and B follows. The number of columns
is a power of two, so that adapters come and go without a new program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from areal_x_jax.architecture import Architecture
from areal_x_jax.leaf import local_name
from areal_x_jax.parameters import Params, adapter_leaves

LEAST_COLUMNS = 16


class SlotAdapters:
    """The adapters of a model's kernels, by name. An adapter has stacked kernels, with the scale in
    lora_b."""

    def __init__(self, arch: Architecture, kernels: Sequence[str]) -> None:
        self._arch = arch
        self._leaves = adapter_leaves(arch, kernels)
        self._adapters: dict[str, Params] = {}
        self._columns: dict[str, slice] = {}
        self._layers: list[Params] = []
        self._capacity = LEAST_COLUMNS

    def put(self, name: str, adapter: Params) -> None:
        self._adapters[name] = adapter
        self._layers = []

    def remove(self, name: str) -> None:
        """Forgets an adapter, which no sequence has."""
        self._adapters.pop(name, None)
        self._layers = []

    def beside(self, params: Params, shapes: Params) -> Params:
        """Returns unstacked parameters with the columns of all adapters. shapes: of an adapter's
        kernels, of any rank."""
        if not self._layers:
            self._lay_out(shapes, params["embed"].dtype)
        both = zip(params["layers"], self._layers, strict=True)
        return {**params, "layers": [layer | own for layer, own in both]}

    def _lay_out(self, shapes: Params, dtype: Any) -> None:
        self._columns, at = {}, 0
        for name, adapter in self._adapters.items():
            rank = next(x.shape[-1] for leaf, x in adapter.items() if leaf.endswith("_lora_a"))
            self._columns[name] = slice(at, at + rank)
            at += rank
        self._capacity = max(LEAST_COLUMNS, 1 << max(at - 1, 0).bit_length())
        self._layers = [{} for _ in range(self._arch.layers)]
        for name, leaf in self._leaves.items():
            axis = 2 if name.endswith("_lora_a") else 1
            shape = list(shapes[name].shape)
            shape[axis] = self._capacity
            whole = jnp.zeros(shape, dtype)
            for own, columns in self._columns.items():
                if name in self._adapters[own]:
                    where = [slice(None)] * 3
                    where[axis] = columns
                    whole = whole.at[tuple(where)].set(self._adapters[own][name])
            for index, layer in enumerate(self._arch.stacked(leaf.stack)):
                self._layers[layer][local_name(name)] = whole[index]

    def chosen(self, adapters: Sequence[str | None]) -> Float32[np.ndarray, "rows columns"]:
        """Returns which columns each row has: 1 for its adapter's, 0 for others'."""
        found = np.zeros((len(adapters), self._capacity), np.float32)
        for row, name in zip(found, adapters, strict=True):
            if name is not None:
                row[self._columns[name]] = 1
        return found


def with_chosen(params: Params, chosen: Array | np.ndarray) -> Params:
    """Returns parameters for rows of which each has an adapter of its own."""
    return {**params, "chosen": chosen}
