"""Tensors sharded over processes (DTensors) and their local parts; a plain tensor is its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter


class ShardedView(NamedTuple):
    """Some numbers of a tensor that lies on several processes: where they would be, were it whole
    and contiguous."""

    of: DTensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.shape, self.stride, self.offset)


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather(x: Tensor) -> Tensor:
    """The whole tensor, which all processes gather together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gather_each(
    tensors: Iterable[tuple[str, Tensor | ShardedView]],
    as_: Callable[[Tensor], Tensor] = lambda x: x,
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors, one after the other; of neighbours that are pieces of one tensor, that is
    gathered once. as_: what is made of each before."""
    last: DTensor | None = None
    for name, x in tensors:
        if isinstance(x, ShardedView):
            if last is not x.of:
                last, whole = x.of, gather(as_(x.of)).contiguous()
            yield name, x.view(whole)
        else:
            yield name, gather(as_(x))


def own_part(whole: Tensor, of: Tensor) -> Tensor:
    """Of a whole tensor what lies where this process's part of `of` does."""
    if not isinstance(of, DTensor):
        return whole
    mesh = of.device_mesh
    # From the last axis of the mesh to the first: a dimension split by both was split by heads
    # before.
    for axis in reversed(range(mesh.ndim)):
        placement = of.placements[axis]
        if not placement.is_replicate():
            parts = whole.chunk(mesh.size(axis), placement.dim)
            at = mesh.get_local_rank(axis)
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def split(x: Parameter, mesh: DeviceMesh, dim: int) -> Parameter:
    """A parameter that every process has whole, of which each keeps its part."""
    parts = distribute_tensor(x.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return Parameter(parts, requires_grad=x.requires_grad)


def mesh_of(x: Tensor) -> DeviceMesh | None:
    return x.device_mesh if isinstance(x, DTensor) else None
