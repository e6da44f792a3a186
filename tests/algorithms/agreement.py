"""One function, the same result on numpy, jax and torch, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.algorithms.frameworks import apply

TOLERANCES = {np.float64: 1e-6, np.float32: 1e-5}


def agree(function: Callable[..., Any], *inputs: Any, dtype: type = np.float64) -> None:
    """Raises AssertionError where jax, jax.jit, torch or torch.compile give another result than numpy, or another shape."""
    expected = _list(apply(function, *inputs, framework="numpy", dtype=dtype))
    for framework in ("jax", "torch"):
        for compiled in (False, "eager"):
            found = _list(apply(function, *inputs, framework=framework, dtype=dtype, compiled=compiled))
            for x, y in zip(found, expected, strict=True):
                assert x.shape == y.shape
                np.testing.assert_allclose(
                    x, y, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], err_msg=f"{framework} {compiled}"
                )


def _list(result: Any) -> list[np.ndarray]:
    return list(result) if isinstance(result, tuple) else [result]
