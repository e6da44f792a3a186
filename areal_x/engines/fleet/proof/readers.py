"""Runs inside a server's worker: reads parameters back as kernels use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_x.engines.fleet.proof.regions import Held
from areal_x.engines.fleet.proof.sums import as_slice


class Unreadable(Exception):
    """A parameter cannot be read back, because of the message."""


@dataclass(frozen=True)
class Reader:
    """One way in which a worker uses a parameter. read: returns the numbers at these indices along each axis, as
    loaders see them; None if nothing stands there. at_once: columns that it reads at a time."""

    use: str
    read: Callable[[Sequence[range]], Any]
    at_once: int = 0


def memory_reader(module: Any, held: Held) -> Callable[[Sequence[range]], Any]:
    """Returns what reads a parameter that kernels read themselves."""

    def read(indices: Sequence[range]) -> Any:
        parameter = getattr(module, held.name, None)
        if parameter is None:
            return None
        if tuple(parameter.shape) != held.shape:
            raise Unreadable(f"it has the shape {tuple(parameter.shape)} for a kernel")
        return parameter.data[tuple(map(as_slice, indices))]

    return read
