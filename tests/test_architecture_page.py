"""docs/architecture.md names every room, and every function that its walks name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.imports import parsed

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STOPS = sorted(set(re.findall(r"`((?:[\w-]+/)*\w+\.py)(?::([\w.]+))?`", PAGE)))
NOT_ROOMS = {"__init__", "__main__", "trainer"}  # the public surface, and another address of the trainer's contract


def definitions(file: Path) -> set[str]:
    """The names of a file's functions, classes and methods, those of classes as Class.method."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        inner = [names(n.body, f"{prefix}{n.name}.") for n in found if isinstance(n, ast.ClassDef)]
        return {f"{prefix}{n.name}" for n in found}.union(*inner)

    return names(parsed(file.read_text(encoding="utf-8")).body)


def problem(path: str, name: str) -> str | None:
    files = [file for file in (ROOT / "areal_x" / path, ROOT / path) if file.is_file()]
    if not files:
        return f"no file {path}"
    if name and name not in definitions(files[0]):
        return f"no {name} in {path}"
    return None


def test_the_walks_have_stops():
    assert len(STOPS) > 40


@pytest.mark.parametrize("path, name", STOPS, ids=[f"{path}:{name}" for path, name in STOPS])
def test_a_stop_of_a_walk_exists(path: str, name: str) -> None:
    assert problem(path, name) is None


def test_a_missing_file_and_a_missing_function_are_found():
    assert problem("rollout/absent.py", "") == "no file rollout/absent.py"
    assert problem("rollout/queue.py", "TrajectoryQueue.absent") == "no TrajectoryQueue.absent in rollout/queue.py"


def test_every_room_is_on_the_page():
    here = [path for path in (ROOT / "areal_x").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    rooms = {path.stem for path in here} - NOT_ROOMS
    rows = "".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    assert sorted(rooms - set(re.findall(r"`(\w+)`", rows))) == []
