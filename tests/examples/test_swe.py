"""Issues in a repository by an unmodified mini-swe-agent, in a Python of its own: its calls are the conversation shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gin
import pytest

from areal_x.agents.repository import prepare, test_patch
from areal_x.config.reader import load
from areal_x.errors import ConfigError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.local import LocalContainers
from areal_x.tasks.swe import read_swe
from areal_x.types import Scored
from examples.swe import warm_start as module
from examples.swe.task import Issue, all_issues, issues
from examples.swe.warm_start import PIECES, batches, given_up, worked
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough

test_patch.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def mini() -> None:
    if not Path("examples/swe/.venv/bin/mini").is_file():
        pytest.skip("needs mini-swe-agent in a Python of its own: see examples/swe/tiny.gin")


def id_of(issue: Issue) -> str:
    return f"{issue.kind.module}/{issue.wrong}/{issue.right}"


@pytest.mark.parametrize("file", gin_files("swe"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path) -> None:
    check_file(file)


def test_an_issue_is_open_before_its_solution_and_closed_after_it() -> None:
    tasks = {task.id: task for task in [*issues(), *issues("test")]}
    assert len(tasks) == len(all_issues()) == 112
    assert len(issues("test")) == 20

    async def passed(solution: str, id: str) -> list[bool]:
        containers = LocalContainers(ContainerLimits(disk_mb=8))
        try:
            about = read_swe(tasks[id])
            container = await containers.start()
            base = await prepare(container, about)
            await container.run(["sh", "-c", solution], directory=about.directory)
            diff = await container.run(["git", "diff", base], directory=about.directory)
            results = await test_patch(await containers.start(), about, diff.output.encode() or b"\n", ())
            return [] if results is None else [result.passed for result in results]
        finally:
            await containers.close()

    for issue in (all_issues()[0], all_issues()[-1]):
        assert asyncio.run(passed(issue.solution, id_of(issue))) == [True, True]
        assert asyncio.run(passed("echo >> README.md", id_of(issue))) == [False, False]


@pytest.mark.usefixtures("mini")
@pytest.mark.parametrize(("turns", "reward"), [(worked, 1.0), pytest.param(given_up, 0.0, marks=thorough)])
def test_an_episode_is_token_for_token_the_demonstration(tmp_path: Path, turns: Any, reward: float) -> None:
    load("examples/swe/tiny.gin")
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    issue = all_issues()[3]
    (task,) = (task for task in [*issues(), *issues("test")] if task.id == id_of(issue))
    shown = demonstration(PIECES, turns(issue), tools=True)
    episode = conversed(gin.get_configurable("swe")(), tmp_path, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == reward
    same_tokens(episode, shown)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"repositories\.issues\.split"):
        issues("both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"repositories\.warm_start\.works"):
        module.warm_start(works=1.5)


def test_the_tutor_works_in_three_of_ten_issues() -> None:
    starts, worked_on = 0, 0
    for batch in batches(4, seed=0, works=0.3):
        starts += (batch.positions == 0)[batch.segment_ids > 0].sum()
        worked_on += (batch.tokens == PIECES.index("sed -i s/") + 2).sum()
    assert worked_on / starts == pytest.approx(0.3, abs=0.07)


@thorough
@pytest.mark.usefixtures("mini")
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"repositories__warm_start__steps": 2, "repositories__warm_start__backend": "torch"}
    rows = trained("swe/tiny.gin", tmp_path, monkeypatch, **settings, train__held_out=())
    assert [row["step"] for row in rows] == [0, 1, 2] or [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["timed_out"] == 0
    assert rows[-1]["scored"] >= 2
    assert rows[-1]["trained_tokens"] > 0
