"""Products by a tool: problems, the tutor, and an episode that goes token for token as it was demonstrated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_x.agents.multi_turn import ToolUse
from areal_x.agents.tools.toolbox import PythonExecutor
from areal_x.errors import ConfigError
from areal_x.types import Scored, Task
from areal_x.workflows.single_turn import SingleTurn
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from examples.tools import warm_start as module
from examples.tools.task import held_out, problems, verify
from examples.tools.warm_start import PIECES, batches, guessed, worked
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import further


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools")
    write_model(directory, PIECES, 0, CHAT_TEMPLATE)
    return directory


@pytest.mark.parametrize("file", gin_files("tools"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def test_each_problem_is_a_product_of_three_digits_and_two_and_none_is_held_out() -> None:
    tasks, unseen = problems(5000, seed=1), held_out()
    for task in [*tasks, *unseen]:
        a, b = map(int, task.id.split("*"))
        assert (len(str(a)), len(str(b))) == (3, 2)
        assert task.prompt == [{"role": "user", "content": f"{a}*{b}="}]
        assert task.answer == str(a * b)
    assert len({task.id for task in unseen}) == 200
    assert not {task.id for task in tasks} & {task.id for task in unseen}
    assert problems(5000, seed=1) == tasks != problems(5000, seed=2)
    assert held_out(7) == unseen[:7]
    with pytest.raises(ConfigError, match=r"tools\.held_out\.count"):
        held_out(201)


def test_only_the_product_itself_is_right() -> None:
    task = Task("417*86", "", "35862")
    assert verify(task, "35862") == 1.0
    for wrong in ("", "35863", "35862 ", "=35862", "035862", "35862.0"):
        assert verify(task, wrong) == 0.0, wrong


def test_an_episode_that_calls_the_tool_is_token_for_token_the_demonstration(model: Path) -> None:
    task = problems(1)[0]
    shown = demonstration(PIECES, worked(task), tools=True)
    workflow = ToolUse(reward=verify, tools=[PythonExecutor(workers=1)], reward_workers=1, max_turns=3)
    episode = conversed(workflow, model, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 1.0
    assert episode.outcome.details["tool_calls"] == 1
    same_tokens(episode, shown)


@pytest.mark.parametrize("tools", [True, False])
def test_an_episode_that_guesses_is_token_for_token_the_demonstration(model: Path, tools: bool) -> None:
    task = problems(1)[0]
    shown = demonstration(PIECES, guessed(task, np.random.default_rng(0)), tools)
    calls_tools = ToolUse(reward=verify, tools=[PythonExecutor(workers=1)], reward_workers=1)
    episode = conversed(calls_tools if tools else SingleTurn(reward=verify, reward_workers=1), model, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 0.0
    same_tokens(episode, shown)


def test_a_guess_is_wrong_by_at_most_a_twentieth() -> None:
    rng = np.random.default_rng(0)
    tasks = problems(500)
    ratios = [int(guessed(task, rng)[-1][1]) / int(task.answer) for task in tasks]
    assert 0.949 < min(ratios) < 0.955
    assert 1.045 < max(ratios) < 1.051
    assert np.mean(np.array(ratios) == 1) < 0.02


def test_the_tutor_calls_the_tool_in_a_fifth_of_the_problems_that_come_with_one() -> None:
    called = PIECES.index("<tool_call>") + 2
    tools = PIECES.index("<tools>") + 2
    counts = np.zeros(3)
    for batch in batches(20, seed=0, calls=0.2):
        assert batch.shape == (25, module.ROW_LENGTH)
        counts += [
            (batch.positions == 0)[batch.segment_ids > 0].sum(),
            (batch.tokens == tools).sum(),
            (batch.tokens == called).sum(),
        ]
    demonstrations, with_tools, with_calls = counts
    assert with_tools / demonstrations == pytest.approx(0.8, abs=0.03)
    assert with_calls / with_tools == pytest.approx(0.2, abs=0.03)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tools\.warm_start\.steps"):
        module.warm_start(steps=1)
    with pytest.raises(ConfigError, match=r"tools\.warm_start\.calls"):
        module.warm_start(calls=1.5)


@pytest.mark.parametrize("file", ["tools", *further("guessing")])
def test_two_steps_of_it(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tools__warm_start__steps": 2, "tools__warm_start__backend": "torch", "tools__held_out__count": 8}
    rows = trained(f"tools/{file}.gin", tmp_path, monkeypatch, **settings)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["scored"], rows[-1]["failed"], rows[-1]["timed_out"]) == (rows[-1]["scored"], 0, 0)
    assert rows[-1]["scored"] >= 8
    assert ("reward/turns" in rows[-1]) == (file == "tools")
