"""JAX compiles quickly for every test of this folder; benchmarks/algorithms.py compiles as a run does."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_quickly(quick_compilation: None) -> None:
    """For every test of this folder."""
