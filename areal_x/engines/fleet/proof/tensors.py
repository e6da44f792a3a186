"""Runs inside a server's worker: sums of torch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_x.engines.fleet.proof.regions import Shape
from areal_x.engines.fleet.proof.sums import BLOCK, Sums, as_slice, of_bits, places

GPU_BLOCK = 2**24  # numbers that a GPU widens at a time


def sums_at(values: Any, indices: Sequence[range], shape: Shape) -> Sums:
    """Returns the sums of numbers that stand at these indices along the axes of a published tensor of this shape."""
    import torch

    weights = [
        torch.tensor(places(axis, shape[axis] if shape else 1)[as_slice(x)]).to(values.device)
        for axis, x in enumerate(indices)
    ]
    integers = {4: torch.int32, 2: torch.int16}[values.itemsize]
    block = BLOCK if values.device.type == "cpu" else GPU_BLOCK
    return of_bits(values.contiguous().view(integers), type_name(values.dtype), weights, block)


def type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
