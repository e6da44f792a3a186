"""What `make test` leaves to `make thorough`: further cases of tests whose first ones it runs, and searches at random."""

from __future__ import annotations

from typing import Any

import pytest

thorough = pytest.mark.thorough


def further(*cases: Any) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize` that repeat on other models, meshes or values what the cases before them
    show. A tuple is the values of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough) for case in cases]


def run_values(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Returns the values of a parameter in the cases of the module that this session runs, so that a fixture prepares those
    alone."""
    cases = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {case[name] for case in cases if name in case}
