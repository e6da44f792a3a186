"""The notebooks: nbmake executes each (colab/*.ipynb), and each asserts what it teaches. Here: what all have in common, and
that a notebook whose lesson is broken fails."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "colab"
NAMES = sorted(file.stem for file in FOLDER.glob("*.ipynb"))
LESSONS = [name for name in NAMES if name != "quickstart"]  # which has pictures of a longer run, and takes minutes


@cache
def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return found


def sources(name: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == kind]


def test_all_begin_with_the_same_cell_which_installs_on_colab() -> None:
    (first,) = {sources(name, "code")[0] for name in LESSONS}
    assert '"google.colab" in sys.modules' in first
    assert "REPOSITORY" in sources("quickstart", "code")[0]


@pytest.mark.parametrize("name", LESSONS)
def test_none_has_outputs_and_each_cell_has_an_id(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    ids = [cell["id"] for cell in cells(name)]
    assert len(ids) == len(set(ids))
    assert "colab-badge" in sources(name, "markdown")[0]


@pytest.mark.parametrize("name", LESSONS)
def test_each_asserts_its_claims(name: str) -> None:
    assert sum(len(re.findall(r"^\s*assert ", source, re.MULTILINE)) for source in sources(name, "code")) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_the_page_about_notebooks_lists_each_under_its_title(name: str) -> None:
    title = sources(name, "markdown")[0].splitlines()[0].removeprefix("# ")
    assert f"| [{title}](../colab/{name}.ipynb) |" in (ROOT / "docs" / "notebooks.md").read_text()


def test_pages_and_notebooks_that_they_name_are_there() -> None:
    for name in NAMES:
        for source in sources(name, "markdown"):
            for page in re.findall(r"`((?:docs|examples|areal_x)/[\w/]+\.\w+)`", source):
                assert (ROOT / page).is_file(), f"{name}: {page}"
            for other in re.findall(r"`(\w+\.ipynb)`", source):
                assert (FOLDER / other).is_file(), f"{name}: {other}"


# What each teaches, undone in one place: the notebook must fail at an assertion.
BROKEN = {
    "loss": ("xp.clip(advantages, 0, None)", "xp.clip(advantages, None, 0)"),
    "gradients": ('"sapo": sapo()', '"sapo": grpo()'),
    "trajectories": ("(group.reward.idxmax(), group.reward.idxmin())", "(group.reward.idxmin(), group.reward.idxmax())"),
    "environment": ("right = action == task.following(self.letter, 1)\n", "right = action == self.letter\n"),
    "agent": ("right += reply", "right -= reply"),
    "distillation": ("teacher=str(teacher)", "teacher=small"),
    "tinker": ("group_size=8, learning_rate=1e-2", "group_size=8, learning_rate=1e-9"),
    "mismatch": ("from_completion(asked, c.tokens", "from_completion(encode(self.tokenizer, task.prompt), c.tokens"),
}


def test_each_lesson_has_a_way_to_break_it() -> None:
    assert set(BROKEN) | {"cluster"} >= set(LESSONS)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_notebook_whose_lesson_is_broken_fails(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    if name == "trajectories":
        pytest.importorskip("anywidget")
    if name == "tinker" and not os.environ.get("TINKER_PYTHON"):
        pytest.skip("TINKER_PYTHON names no Python with the cookbook")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    old, new = BROKEN[name]
    places = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
    assert len(places) == 1
    assert places[0].source.count(old) == 1
    places[0].source = places[0].source.replace(old, new)
    with pytest.raises(nbclient.exceptions.CellExecutionError) as failure:
        nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert failure.value.ename == "AssertionError", failure.value
