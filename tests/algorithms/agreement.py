"""Asserts that a function gives the same result on numpy, jax and torch, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.algorithms.frameworks import apply

# Each framework in both precisions, and compiled in one of them: most of the time goes into compiling (jax compiles every
# operation on its own even without jit). benchmarks/algorithms.py covers everything in both precisions, torch with inductor.
WAYS = {
    np.float64: (("torch", False), ("torch", "eager"), ("jax", True)),
    np.float32: (("numpy", False), ("torch", False), ("jax", False)),
}
TOLERANCES = {np.float64: 1e-6, np.float32: 1e-5}


def agree(function: Callable[..., Any], *inputs: Any, torch_compiled: bool = True) -> None:
    """Raises AssertionError if one of WAYS gives a different result or shape than numpy in float64.

    torch_compiled: False if another call has compiled the same function with other settings.
    """
    expected = _list(apply(function, *inputs, framework="numpy"))
    for dtype, ways in WAYS.items():
        for framework, compiled in ways:
            if compiled == "eager" and not torch_compiled:
                continue
            found = _list(apply(function, *inputs, framework=framework, dtype=dtype, compiled=compiled))
            for x, y in zip(found, expected, strict=True):
                assert x.shape == y.shape
                way = f"{framework} {dtype.__name__} compiled: {compiled}"
                np.testing.assert_allclose(x, y, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], err_msg=way)


def _list(result: Any) -> list[np.ndarray]:
    return list(result) if isinstance(result, tuple) else [result]
