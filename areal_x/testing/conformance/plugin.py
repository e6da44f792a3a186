"""A pytest plugin with the option --backend. (pytest reads options of a conftest.py only in the
directories of its arguments, not in packages named with --pyargs.)"""

from __future__ import annotations

import pytest

from areal_x.testing.conformance.fixtures import installed


def pytest_addoption(parser: pytest.Parser) -> None:
    wanted = "test this backend only (may be given several times); default: every installed one"
    parser.addoption("--backend", action="append", default=[], metavar="NAME", help=wanted)


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(config.getoption("--backend")) - set(installed())
    if unknown:
        names = ", ".join(installed()) or "none"
        raise pytest.UsageError(
            f"--backend {', '.join(sorted(unknown))}: the installed backends are {names}"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--backend")
    if not chosen:
        return

    def is_chosen(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        return callspec is None or callspec.params.get("backend", chosen[0]) in chosen

    left_out = [item for item in items if not is_chosen(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_chosen(item)]
