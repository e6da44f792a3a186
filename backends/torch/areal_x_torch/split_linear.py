"""A linear layer that can be split over the processes of a tensor group and computes its own product.

If it is split by rows, each process has a part of its outputs, else a part of its inputs, of which all
processes' outputs are summed.

A fused layer has several layers' outputs one after another, such as queries, keys and values, and a
process computes a part of each of them. It holds another part of the rows: an even one of all, as of
every split layer, so that its files, moments and sharding are no others'. Before each product the
processes exchange rows of the weight, which are fewer bytes than the outputs of a long row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from areal_x_torch.collectives import (
    AllToAll,
    CopyToGroup,
    Exchange,
    SumOverGroup,
    all_tokens,
    summed_own_tokens,
)
from areal_x_torch.dtensors import local, split

BY_ROWS = ("weight", "bias", "lora_B.weight")  # what is split by rows where the layer is


class SplitLinear(nn.Linear):
    """A linear layer with the parameters of another. others: the processes that have the other parts
    of a split layer. fused: the numbers of outputs of the layers that it is, if it is several."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # no parameters of its own: they are those of `layer`
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.others: ProcessGroup | None = None
        self.by_rows = True
        self.fused: tuple[int, ...] = ()
        self.tokens_apart = False  # see areal_x_torch.sequence_parallel

    @abstractmethod
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output of this process's part."""

    def forward(self, x: Float[Tensor, "*_ features"]) -> Float[Tensor, "*_ out"]:
        bias = None if self.bias is None else self.own("bias")
        if self.others is None:
            return self._product(x, bias)
        if self.by_rows:
            return self._product(
                x if self.tokens_apart else CopyToGroup.apply(x, self.others), bias
            )
        summed, product = None, self._product(x, None)
        if self.tokens_apart:
            summed = Exchange.apply(product, self.others, summed_own_tokens, all_tokens)
        else:
            summed = SumOverGroup.apply(product, self.others)
        return summed if bias is None else summed + bias

    def own(self, name: str) -> Tensor:
        """Returns the part of a parameter that this process computes with."""
        part = local(self.get_parameter(name))
        if self.others is None or not self.fused or name not in BY_ROWS:
            return part
        return exchanged_rows(part, self.fused, self.others)

    def split(self, mesh: DeviceMesh, by_rows: bool, fused: Sequence[int] = ()) -> None:
        """Leaves on each process its part of the rows of the weight, or of the columns. fused: see
        the class; each number is a multiple of the number of processes."""
        self.others, self.by_rows, self.fused = mesh.get_group(), by_rows, tuple(fused)
        self.weight = split(self.weight, mesh, 0 if by_rows else 1)
        if by_rows and self.bias is not None:
            self.bias = split(self.bias, mesh, 0)


class PlainLinear(SplitLinear):
    """A linear layer whose products are torch's."""

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.own("weight"), bias)


def exchanged_rows(
    part: Float[Tensor, "rows ..."], fused: Sequence[int], group: ProcessGroup
) -> Float[Tensor, "rows ..."]:
    """Returns this process's part of each of the fused layers, one after another. part: its part of
    all rows."""
    count, rank, held = group.size(), group.rank(), len(part)
    starts = [sum(fused[:i]) for i in range(len(fused))]

    def common(holder: int, user: int) -> list[tuple[int, int]]:
        """Returns the rows that one process holds and the other computes with, as ranges of the
        holder's."""
        first, found = holder * held, []
        for start, rows in zip(starts, fused, strict=True):
            begin = max(start + user * rows // count, first) - first
            end = min(start + (user + 1) * rows // count, first + held) - first
            found += [(begin, end)] if begin < end else []
        return found

    def size(holder: int, user: int) -> int:
        return sum(end - begin for begin, end in common(holder, user))

    everyone = range(count)
    by_user = [part[begin:end] for user in everyone for begin, end in common(rank, user)]
    sent, received = [size(rank, x) for x in everyone], [size(x, rank) for x in everyone]
    own: Tensor = AllToAll.apply(torch.cat(by_user), sent, received, group)
    return own
