"""Adapters of the sequences that a sampler decodes together, each of which may have another one.

The matrices of all adapters are side by side: a layer computes x · A for the columns of all, keeps for
each row those of its own (the others' are 0) and multiplies with B. At the sizes of decoding, where a
step reads every weight for a few rows, this costs as much as reading the columns once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from areal_x_torch.split_linear import SplitLinear

AdapterMatrices = Mapping[str, tuple[Tensor, Tensor]]
"""Of each layer, A [rank, in] and B [out, rank], with the scale in B."""


class SlotAdapters:
    """The adapters of a model's layers, by name."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[str], dtype: torch.dtype) -> None:
        self._chosen = threading.local()  # lanes prefill at the same time
        self._dtype = dtype
        self._adapters: dict[str, AdapterMatrices] = {}
        self._columns: dict[str, slice] = {}
        self.count = 0
        self._layers: dict[str, SlotLinear] = {}
        for name in layers:
            self._layers[name] = SlotLinear(model.get_submodule(name), self)
            model.set_submodule(name, self._layers[name])

    def put(self, name: str, matrices: AdapterMatrices) -> None:
        self._adapters[name] = matrices
        self._lay_out()

    def remove(self, name: str) -> None:
        """Forgets an adapter, which no sequence has."""
        if self._adapters.pop(name, None) is not None:
            self._lay_out()

    @torch.inference_mode()
    def _lay_out(self) -> None:
        self._columns, at = {}, 0
        for name, matrices in self._adapters.items():
            rank = max(len(a) for a, _ in matrices.values())
            self._columns[name] = slice(at, at + rank)
            at += rank
        self.count = at
        for name, layer in self._layers.items():
            like = {"dtype": self._dtype, "device": layer.weight.device}
            a = torch.zeros(at, layer.in_features, **like)
            b = torch.zeros(layer.out_features, at, **like)
            for adapter, columns in self._columns.items():
                if (own := self._adapters[adapter].get(name)) is not None:
                    a[columns].copy_(own[0])
                    b[:, columns].copy_(own[1])
            # In place: a traced step has these tensors.
            layer.columns_a.data, layer.columns_b.data = a, b

    def chosen(self, adapters: Sequence[str | None]) -> Float[Tensor, "rows columns"]:
        """Returns which columns each row has: 1 for its adapter's, 0 for others'."""
        found = np.zeros((len(adapters), self.count), np.float32)
        for row, name in zip(found, adapters, strict=True):
            if name is not None:
                row[self._columns[name]] = 1
        device = next(iter(self._layers.values())).weight.device
        return torch.from_numpy(found).to(device, self._dtype)

    @contextmanager
    def being(self, chosen: Float[Tensor, "rows columns"] | None) -> Iterator[None]:
        """Gives the rows of all layers' inputs their adapters."""
        self._chosen.now = chosen
        try:
            yield
        finally:
            self._chosen.now = None

    @property
    def now(self) -> Tensor | None:
        found: Tensor | None = getattr(self._chosen, "now", None)
        return found

    def __deepcopy__(self, _: object) -> SlotAdapters:
        return self


class SlotLinear(SplitLinear):
    """A linear layer with the columns of all adapters."""

    def __init__(self, layer: nn.Module, slots: SlotAdapters) -> None:
        assert isinstance(layer, nn.Linear)
        super().__init__(layer)
        self.slots = slots
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.register_buffer("columns_a", torch.zeros(0, layer.in_features, **like), False)
        self.register_buffer("columns_b", torch.zeros(layer.out_features, 0, **like), False)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = linear(x, self.weight, bias)
        chosen = self.slots.now
        if chosen is None:
            return y
        own = linear(x, self.columns_a) * chosen[:, None]
        return y + linear(own, self.columns_b)
