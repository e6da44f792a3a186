"""A tensor that lies on several processes, and its parts. One that does not is its own part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def gathered(x: Tensor) -> Tensor:
    """The whole tensor, which all processes gather together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def own_part(whole: Tensor, of: Tensor) -> Tensor:
    """Of a whole tensor what lies where this process's part of `of` does."""
    if not isinstance(of, DTensor):
        return whole
    mesh = of.device_mesh
    # From the last axis of the mesh to the first: a dimension split by both was split by heads before.
    for axis in reversed(range(mesh.ndim)):
        placement = of.placements[axis]
        if not placement.is_replicate():
            parts = whole.chunk(mesh.size(axis), placement.dim)
            at = mesh.get_local_rank(axis)
            whole = parts[at] if at < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def mesh_of(x: Tensor) -> DeviceMesh | None:
    return x.device_mesh if isinstance(x, DTensor) else None
