"""A linear layer that can be split over the processes of a tensor group and computes its own product.

If it is split by rows, each process has a part of its outputs, else a part of its inputs, of which all
processes' outputs are summed.
"""

from __future__ import annotations

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from areal_x_torch.collectives import CopyToGroup, SumOverGroup
from areal_x_torch.dtensors import local, split


class SplitLinear(nn.Linear):
    """A linear layer with the parameters of another. others: the processes that have the other parts
    of a split layer."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # no parameters of its own: they are those of `layer`
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.others: ProcessGroup | None = None
        self.by_rows = True

    @abstractmethod
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output of this process's part."""

    def forward(self, x: Float[Tensor, "*_ features"]) -> Float[Tensor, "*_ out"]:
        bias = None if self.bias is None else local(self.bias)
        if self.others is None or self.by_rows:
            return self._product(
                x if self.others is None else CopyToGroup.apply(x, self.others), bias
            )
        summed: Tensor = SumOverGroup.apply(self._product(x, None), self.others)
        return summed if bias is None else summed + bias

    def own(self, name: str) -> Tensor:
        """Returns this process's part of a parameter."""
        return local(self.get_parameter(name))

    def split(self, mesh: DeviceMesh, by_rows: bool) -> None:
        """Leaves on each process its part of the rows of the weight, or of the columns."""
        self.others, self.by_rows = mesh.get_group(), by_rows
        self.weight = split(self.weight, mesh, 0 if by_rows else 1)
        if by_rows and self.bias is not None:
            self.bias = split(self.bias, mesh, 0)
