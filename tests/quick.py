"""The option --quick, of `make quick`: the part of the suite that fits into 90 seconds on two quiet cores.

Of each test function the first case is run. Left out are tests with a real vLLM server (marker `server`), tests that train to a
result or start many processes (marker `slow`), and those that tests/long_tests.txt lists because they took long. The list is a
measurement, made on a quiet machine:

    python -m pytest --quick --measure -n 2 --dist loadgroup tests      # adds those that took long to the list

Repeat it until none is added: a module's fixtures fall to the first of its tests that is left. Without the list it begins anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

LISTED = Path(__file__).with_name("long_tests.txt")
LONG = 0.4  # seconds that a function's first case takes, its own fixtures included
MARKERS = ("server", "slow")


def function_of(nodeid: str) -> str:
    """The id without the case and without pytest-xdist's group."""
    return re.split(r"[\[@]", nodeid, maxsplit=1)[0]


def seconds_listed() -> dict[str, float]:
    lines = LISTED.read_text().splitlines() if LISTED.is_file() else []
    return {name: float(seconds) for name, seconds in (line.split() for line in lines if not line.startswith("#"))}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first case of each test that is neither long nor needs a server")
    parser.addoption("--measure", action="store_true", help="with --quick: add the tests that take long to the list")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    kept, seen = [], set(seconds_listed())
    for item in items:
        name = function_of(item.nodeid)
        if name not in seen and not any(item.get_closest_marker(marker) for marker in MARKERS):
            seen.add(name)
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


class Measure:
    """Adds up what each function takes: setup, call and teardown."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = seconds_listed() | {name: x for name, x in self.seconds.items() if x > LONG}
        long = sorted(f"{name} {seconds:.1f}" for name, seconds in found.items())
        head = f"# Tests whose first case took more than {LONG} s, with the seconds; written by tests/quick.py."
        LISTED.write_text("\n".join([head, *long]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure"):
        config.pluginmanager.register(Measure())
