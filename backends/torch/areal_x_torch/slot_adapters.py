"""Adapters of the sequences that a sampler decodes together, each of which may have another one.

    columns of a layer     │ a a a a · │ b b │ c c c c c c │   A [columns, in] and B [columns, out]
    adapters in a step     ── x Aᵀ B ──        ── x Aᵀ B ──   of those whose sequences run

The matrices of all adapters are side by side; a step multiplies with those of the adapters that its
rows have, one after another, each with all rows, and adds to each row what its own gives. So the
shapes of a row's products are those of its own adapter, whatever others there are, and so are their
bits; and what is not finite in one adapter stays there. An adapter has a multiple of ALIGNED columns,
with zeros beyond its rank: narrower products have other bits in other rows.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from areal_x_torch.split_linear import SplitLinear

AdapterMatrices = Mapping[str, tuple[Tensor, Tensor]]
"""Of each layer, A [rank, in] and B [out, rank], with the scale in B."""

ALIGNED = 16  # columns: of an address, too, wherever an adapter is


class Running(NamedTuple):
    """The adapters of some rows: where the columns of each begin and how many they are, on the host,
    and which rows have it."""

    columns: Int[Tensor, "adapters 2"]
    rows: Bool[Tensor, "adapters rows 1 1"]


class SlotAdapters:
    """The adapters of a model's layers, by name."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[str], dtype: torch.dtype) -> None:
        self._running = threading.local()  # lanes prefill at the same time
        self._columns: dict[str, slice] = {}
        self._capacity = 0
        self._layers: dict[str, SlotLinear] = {}
        for name in layers:
            self._layers[name] = SlotLinear(model.get_submodule(name), self, dtype)
            model.set_submodule(name, self._layers[name])

    @torch.inference_mode()
    def put(self, name: str, matrices: AdapterMatrices) -> None:
        self.remove(name)
        rank = max(len(a) for a, _ in matrices.values())
        count = -(-rank // ALIGNED) * ALIGNED
        begin = self._room(count)
        self._columns[name] = slice(begin, begin + count)
        for layer, module in self._layers.items():
            a, b = (pool[begin : begin + count] for pool in module.pools)
            a.zero_(), b.zero_()
            if layer in matrices:
                own_a, own_b = matrices[layer]
                a[: len(own_a)].copy_(own_a)
                b[: len(own_a)].copy_(own_b.T)

    def remove(self, name: str) -> None:
        """Forgets an adapter, which no sequence has."""
        self._columns.pop(name, None)

    def drawn(self, rank: int, random: torch.Generator) -> AdapterMatrices:
        """Returns random matrices of all layers."""

        def pair(layer: SlotLinear) -> tuple[Tensor, Tensor]:
            shapes = (rank, layer.in_features), (layer.out_features, rank)
            a, b = (torch.randn(shape, generator=random) for shape in shapes)
            return a * layer.in_features**-0.5, b * rank**-0.5

        return {name: pair(layer) for name, layer in self._layers.items()}

    def _room(self, count: int) -> int:
        """Returns the first of so many columns that nobody has; makes more if there are none."""
        begin = 0
        for taken in sorted(self._columns.values(), key=lambda x: x.start):
            if begin + count <= taken.start:
                break
            begin = taken.stop
        if begin + count > self._capacity:
            self._capacity = max(2 * self._capacity, begin + count)
            for module in self._layers.values():
                for pool in module.pools:
                    more = pool.new_zeros(self._capacity, pool.shape[1])
                    more[: len(pool)] = pool
                    pool.data = more  # in place: a traced step has this tensor
        return begin

    def running(self, adapters: Sequence[str | None]) -> Running:
        """Returns the adapters of rows."""
        names = [name for name in dict.fromkeys(adapters) if name is not None]
        own = [self._columns[name] for name in names]
        columns = np.array([(x.start, x.stop - x.start) for x in own], np.int64).reshape(-1, 2)
        rows = np.array([[x == name for x in adapters] for name in names], bool)
        device = next(iter(self._layers.values())).weight.device
        shaped = torch.from_numpy(rows.reshape(len(names), len(adapters), 1, 1))
        return Running(torch.from_numpy(columns), shaped.to(device))

    @contextmanager
    def being(self, running: Running | None) -> Iterator[None]:
        """Gives the rows of all layers' inputs their adapters."""
        self._running.now = running
        try:
            yield
        finally:
            self._running.now = None

    @property
    def now(self) -> Running | None:
        found: Running | None = getattr(self._running, "now", None)
        return found

    def __deepcopy__(self, _: object) -> SlotAdapters:
        return self


class SlotLinear(SplitLinear):
    """A linear layer with the columns of all adapters."""

    def __init__(self, layer: nn.Module, slots: SlotAdapters, dtype: torch.dtype) -> None:
        assert isinstance(layer, nn.Linear)
        super().__init__(layer)
        self.slots = slots
        like = {"dtype": dtype, "device": layer.weight.device}
        self.register_buffer("columns_a", torch.zeros(0, layer.in_features, **like), False)
        self.register_buffer("columns_b", torch.zeros(0, layer.out_features, **like), False)

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        return self.columns_a, self.columns_b

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = linear(x, self.weight, bias)
        running = self.slots.now
        if running is None:
            return y
        added: Tensor = add_products(y, x, *self.pools, *running)
        return added


def _add_products(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, rows: Tensor
) -> Tensor:
    """Returns y [rows, width, out] with x Aᵀ B of the adapter of each row added. x: [rows, width,
    in]. columns, rows: see `Running`."""
    for index in range(columns.size(0)):
        begin, count = int(columns[index, 0]), int(columns[index, 1])
        inner = x @ a.narrow(0, begin, count).t()
        y = torch.where(rows[index], y + inner @ b.narrow(0, begin, count), y)
    return y


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated, see areal_x_torch.decode_step
    # A script and not traced: a traced loop would have as many turns as in the example.
    add_products = torch.jit.script(_add_products)
