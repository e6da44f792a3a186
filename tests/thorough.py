"""What `make test` leaves to `make thorough`: further cases of tests whose first ones it runs, and searches at random.

The option --share I/N takes one of N shares of the cases, by their names: all of them together are all cases, each once.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", metavar="I/N", help="the I-th of N shares of the cases")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = map(int, config.getoption("--share").split("/"))
    if not 1 <= share <= shares:
        raise pytest.UsageError(f"--share {share}/{shares}: shares are 1 to {shares}")
    if shares > 1:
        of_share = [crc32(item.nodeid.encode()) % shares == share - 1 for item in items]
        config.hook.pytest_deselected(items=[item for item, own in zip(items, of_share, strict=True) if not own])
        items[:] = [item for item, own in zip(items, of_share, strict=True) if own]
