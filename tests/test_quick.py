"""The selection of `make quick` (tests/quick.py), and of a share of `make thorough` (tests/thorough.py)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import quick, thorough

ROOT = Path(__file__).parents[1]


class Item:
    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers


def selected(items: list[Item], monkeypatch: pytest.MonkeyPatch, long: set[str], **options: bool) -> list[str]:
    monkeypatch.setattr(quick, "seconds_listed", lambda: dict.fromkeys(long, 1.0))
    chosen = {"--quick": True, **options}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    quick.pytest_collection_modifyitems(SimpleNamespace(getoption=chosen.__getitem__, hook=hook), items)
    return [item.nodeid for item in items]


def items() -> list[Item]:
    return [Item("a.py::one[1]"), Item("a.py::one[2]"), Item("a.py::two"), Item("a.py::served", "server"), Item("a.py::long")]


def test_the_first_case_of_each_short_function_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected(items(), monkeypatch, {"a.py::long"}) == ["a.py::one[1]", "a.py::two"]


def test_measuring_adds_to_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quick, "LISTED", tmp_path / "list")
    for runs in ({"a.py::one[1]@group": 2.0, "a.py::two": 0.1}, {"a.py::two@group": 0.5}):
        measure = quick.Measure()
        for nodeid, seconds in runs.items():
            for phase in (0.75, 0.25):
                measure.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=phase * seconds))
        measure.pytest_sessionfinish()
    assert quick.seconds_listed() == {"a.py::one": 2.0, "a.py::two": 0.5}


def test_without_the_option_everything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(selected(items(), monkeypatch, set(), **{"--quick": False})) == 5


def test_every_long_test_that_is_listed_exists() -> None:
    missing = []
    for name in quick.seconds_listed():
        file, *parts = name.split("::")
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        for module in re.findall(r"^from areal_x\.(\S+) import \*", text, re.MULTILINE):  # the conformance suite
            text += (ROOT / "areal_x" / f"{module.replace('.', '/')}.py").read_text()
        # A state machine of hypothesis is named by its class alone; its method runTest is inherited.
        if not all(
            re.search(rf"^\s*(def|class|async def) {part}\b|^{part} = ", text, re.MULTILINE)
            for part in parts
            if part != "runTest"
        ):
            missing.append(name)
    assert missing == []


def share(which: str) -> list[str]:
    cases = [Item(f"a.py::one[{number}]") for number in range(100)]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    thorough.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: which, hook=hook), cases)
    return [case.nodeid for case in cases]


def test_shares_are_together_all_cases_each_once() -> None:
    parts = [share(f"{number}/3") for number in (1, 2, 3)]
    assert sorted(case for part in parts for case in part) == sorted(share("1/1"))
    assert all(20 < len(part) < 50 for part in parts)
    with pytest.raises(pytest.UsageError, match="shares are 1 to 3"):
        share("4/3")
