"""How evenly experts are used, and the step of their biases, by hand and in every array library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_x.protocols.expert_load import bias_step, max_violation

LOAD = [[4, 0, 1, 3], [2, 2, 2, 2], [0, 0, 0, 9]]


def array(library: str) -> Any:
    if library == "numpy":
        return np.array(LOAD, np.float32)
    if library == "jax":
        return pytest.importorskip("jax.numpy").array(LOAD, np.float32)
    torch = pytest.importorskip("torch")
    return torch.tensor(LOAD, dtype=torch.float32)


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_experts_above_the_mean_of_their_layer_lose_and_those_below_it_gain(library: str) -> None:
    expected = [[-0.5, 0.5, 0.5, -0.5], [0, 0, 0, 0], [0.5, 0.5, 0.5, -0.5]]
    np.testing.assert_array_equal(np.asarray(bias_step(array(library), 0.5)), expected)


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_the_violation_is_the_largest_load_over_the_mean_less_one(library: str) -> None:
    found = max_violation(array(library))
    assert float(found) == pytest.approx(((4 / 2 - 1) + 0 + (9 / 2.25 - 1)) / 3)
    assert float(max_violation(0 * array(library))) == 0
