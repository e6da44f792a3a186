"""Tensors sharded over processes (DTensors) and their local parts; a plain tensor is its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter


class ShardedView(NamedTuple):
    """A view of a sharded tensor: shape, strides and offset in the whole, contiguous tensor."""

    of: DTensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.shape, self.stride, self.offset)


class Joined(NamedTuple):
    """A tensor, perhaps sharded, of whose axes some are joined in a file: those of `order`, with the
    file's shape."""

    of: Tensor
    order: tuple[int, ...]
    shape: torch.Size

    def view(self, whole: Tensor) -> Tensor:
        """Returns the whole tensor as it stands in the file; a copy."""
        return whole.permute(self.order).reshape(self.shape)

    def read(self, x: Tensor) -> Tensor:
        """Returns the whole tensor of what stands in the file."""
        apart = x.reshape([self.of.shape[axis] for axis in self.order])
        return apart.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


# A model's tensor by the name of its file.
Stored: TypeAlias = Tensor | ShardedView | Joined


def local(x: Tensor) -> Tensor:
    """Returns this process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather(x: Tensor) -> Tensor:
    """Returns the whole tensor, which all processes gather together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gather_each(
    tensors: Iterable[tuple[str, Stored]],
    as_: Callable[[str, Tensor], Tensor] = lambda _, x: x,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors, one after another; a tensor of which neighbours are views is
    gathered once. as_: applied to each, with its name, before it is gathered."""
    last: DTensor | None = None
    for name, x in tensors:
        if isinstance(x, ShardedView):
            if last is not x.of:
                last, whole = x.of, gather(as_(name, x.of)).contiguous()
            yield name, x.view(whole)
        elif isinstance(x, Joined):
            yield name, x.view(gather(as_(name, x.of)))
        else:
            yield name, gather(as_(name, x))


def own_part(whole: Tensor, of: Tensor) -> Tensor:
    """Returns the part of a whole tensor at the place of this process's part of `of`."""
    if not isinstance(of, DTensor):
        return whole
    mesh = of.device_mesh
    # From the last axis of the mesh to the first: a dimension split by both was split by heads first.
    for axis in reversed(range(mesh.ndim)):
        placement = of.placements[axis]
        if not placement.is_replicate():
            parts = whole.chunk(mesh.size(axis), placement.dim)
            at = mesh.get_local_rank(axis)
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def split(x: Parameter, mesh: DeviceMesh, dim: int) -> Parameter:
    """Shards a parameter that every process has whole."""
    parts = distribute_tensor(x.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return Parameter(parts, requires_grad=x.requires_grad)


def mesh_of(x: Tensor) -> DeviceMesh | None:
    return x.device_mesh if isinstance(x, DTensor) else None
