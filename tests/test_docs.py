"""Documentation that is made from the code says what the code says, and what it shows works as it is printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x import plan, train
from areal_x.algorithms.assembly import PARTS, PENALTIES
from areal_x.config.reader import load
from areal_x.config.types import check_early, check_experiment
from tests import forking
from tests.conftest import environment_with
from tests.docs_pages import BLOCK, NOT_RUN, ROOT, blocks, pages, write_modules

EXAMPLE = "examples/arithmetic/grpo.gin"  # where a page says FILE.gin
GIN = [(page, line, text) for page in pages("gin") for line, text in blocks(page, "gin")]
COMMAND = re.compile(r"-m (areal_x\.\w+) (.*)")
COMMANDS = [
    (page.name, COMMAND.search(line))
    for language in ("sh", "shell")
    for page in pages(language)
    for _, text in blocks(page, language)
    for line in text.replace("\\\n", " ").splitlines()
    if COMMAND.search(line)
]


def test_the_page_of_configurables_is_what_the_code_says():
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True)


def test_the_picture_of_the_architecture_is_what_the_layout_allows():
    subprocess.run([sys.executable, "docs/draw_architecture.py", "--check"], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """By page what went wrong when its Python was run, all pages in one process of their own."""
    done = forking.run([sys.executable, "-m", "tests.docs_pages"], environment_with(1), ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("page", [page.name for page in pages("python")])
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, problems: dict[str, str]) -> None:
    assert problems[page] == ""


def test_what_is_not_run_is_still_there():
    shown = "".join(text for page in pages("python") for _, text in blocks(page, "python"))
    assert [first for first in NOT_RUN if first not in shown] == []


@pytest.mark.parametrize("page, line, text", GIN, ids=[f"{page.name}:{line}" for page, line, _ in GIN])
def test_the_settings_of_a_page_can_be_read(page: Path, line: int, text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_modules(tmp_path)
    file = tmp_path / "page.gin"
    file.write_text(text, encoding="utf-8")
    before = set(sys.modules)
    try:
        check_early(load(file))
    finally:
        forget(set(sys.modules) - before, tmp_path)


def forget(modules: set[str], folder: Path) -> None:
    """Modules of a folder that is gone with the test, and what they registered."""
    import gin

    for name in modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
            for selector in [s for s, _ in gin.config._REGISTRY.items() if s.startswith(f"{name}.")]:
                gin.config._REGISTRY.pop(selector)


@pytest.mark.parametrize("page, found", COMMANDS, ids=[f"{page}: {found[0]}"[:60] for page, found in COMMANDS])
def test_the_commands_of_a_page_are_understood(page: str, found: re.Match[str]) -> None:
    module, rest = found[1], shlex.split(found[2].replace("FILE.gin", EXAMPLE), comments=True)
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    if module in ("areal_x.train", "areal_x.plan"):
        options = (train if module == "areal_x.train" else plan).parse(rest)
        config = load(ROOT / options.file, options.bindings)
        check_early(config)
        check_experiment(config)


SETTING = re.compile(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`")
GUIDES = ("first_run.md", "troubleshooting.md", "best_practices.md", "migration.md", "sizing.md", "monitoring.md")


@pytest.mark.parametrize("page", GUIDES)
def test_a_setting_that_a_guide_names_exists(page: str) -> None:
    """Of a table that translates, the column that is this project's."""
    listed = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    recipes = {name.removesuffix(".parts") for name in listed if name.endswith(".parts")}
    listed |= {f"{recipe}.{part}" for recipe in recipes for part in (*PARTS, *PENALTIES)}
    sections = {name.partition(".")[0] for name in listed}
    text = (ROOT / "docs" / page).read_text()
    if page == "migration.md":
        text = "".join(line.split(" | ")[1] + "\n" for line in text.splitlines() if line.startswith("|") and " | " in line)
    named = [name for name in SETTING.findall(text) if name.partition(".")[0] in sections]
    assert named
    assert [name for name in named if name not in listed] == []


def test_every_block_says_what_language_it_is_in():
    known = {"python", "gin", "sh", "shell", "text", "toml", "javascript", "json"}
    shown = {m[1] for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for m in BLOCK.finditer(page.read_text())}
    assert shown <= known
