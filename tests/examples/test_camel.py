"""Products by a CAMEL agent, as it is, in a Python of its own: its calls are the conversation that a workflow would have."""

from __future__ import annotations

from pathlib import Path

import gin
import pytest

from areal_x.config.reader import load
from areal_x.types import Scored
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from examples.tools.task import problems
from examples.tools.warm_start import pieces, worked
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained

TOOL = ("multiply", "factors")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def camel() -> None:
    if not Path("examples/camel/.venv/bin/python").is_file():
        pytest.skip("needs CAMEL in a Python of its own: see examples/camel/tiny.gin")


@pytest.mark.parametrize("file", gin_files("camel"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path) -> None:
    check_file(file)


@pytest.mark.usefixtures("camel")
def test_an_episode_of_the_agent_is_token_for_token_the_demonstration(tmp_path: Path) -> None:
    load("examples/camel/tiny.gin")
    write_model(tmp_path, pieces(*TOOL), 0, CHAT_TEMPLATE)
    task = problems(1)[0]
    shown = demonstration(pieces(*TOOL), worked(task, *TOOL), tools=True)
    episode = conversed(gin.get_configurable("agent_process")(), tmp_path, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 1.0
    assert (episode.outcome.details["first"], episode.outcome.details["continued"]) == (1, 1)
    same_tokens(episode, shown)


@pytest.mark.usefixtures("camel")
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tools__warm_start__steps": 2, "tools__warm_start__backend": "torch", "tools__held_out__count": 2}
    rows = trained("camel/tiny.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
    assert rows[-1]["scored"] >= 8
    assert rows[-1]["trained_tokens"] > 0
