"""Elementwise functions of large arrays as one kernel on a GPU, which reads and writes them once
instead of once for each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P, T = ParamSpec("P"), TypeVar("T")


def fused(function: Callable[P, T], rows: Tensor) -> Callable[P, T]:
    """Returns the function, compiled if it is given these rows on a GPU. They are its first
    argument, and their number differs from call to call; one program is compiled for each number of
    columns, because one for all would take twice the time."""
    few, exact = len(rows) < 2, rows.dtype == torch.float32
    if rows.device.type != "cuda" or few or exact or not find_spec("triton"):
        return function
    return _of_any_rows(function)


@cache
def _of_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=False)

    def call(*args: Any) -> Any:
        for x in _tensors(args):
            torch._dynamo.mark_dynamic(x, 0)
        return compiled(*args)

    return call


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """All tensors, also in named tuples: each has a number or a list for each row."""
    nested = (_tensors(x) if isinstance(x, tuple) else [x] for x in args)
    return [x for xs in nested for x in xs if isinstance(x, Tensor)]
