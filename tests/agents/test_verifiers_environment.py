"""Environments made of the package's own classes, run unchanged through the gateway."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areal_x.agents import verifiers_environment as module
from areal_x.agents.agent import Agent
from areal_x.agents.verifiers_environment import verifiers_agent, verifiers_tasks
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.types import Failed, Scored
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from examples.tools.warm_start import ARGUMENT, PIECES, TOOL, calling
from tests.examples.running import Script, conversed, same_tokens

NAME = "products-of-ours"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment of products, with or without a tool."""
    vf = pytest.importorskip("verifiers")
    datasets = pytest.importorskip("datasets")
    if not hasattr(vf, "load_environment"):
        pytest.skip("this version of verifiers has other environments")

    async def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer) if completion else 0.0

    def python(code: str) -> str:
        """Runs Python.

        Args:
            code: The program.
        """
        a, b = code.split("*")
        return str(int(a) * int(b))

    def load_environment(tools: bool = False, digits: int = 3) -> Any:
        numbers = [10 ** (digits - 1) + n for n in range(4)]
        asked = {"question": [f"{n}*{n}=" for n in numbers], "answer": [str(n * n) for n in numbers]}
        data, others = datasets.Dataset.from_dict(asked), datasets.Dataset.from_dict({name: x[2:] for name, x in asked.items()})
        about = {"dataset": data, "eval_dataset": others, "rubric": vf.Rubric(funcs=[right])}
        return vf.ToolEnv(tools=[python], max_turns=4, **about) if tools else vf.SingleTurnEnv(**about)

    made = ModuleType(NAME.replace("-", "_"))
    made.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    yield
    module._environment.cache_clear()


def test_tasks_are_the_environments(installed: None) -> None:
    tasks = verifiers_tasks(NAME)
    assert [task.prompt for task in tasks] == [[{"role": "user", "content": f"{n}*{n}="}] for n in (100, 101, 102, 103)]
    assert [task.answer for task in verifiers_tasks(NAME, "test")] == [str(102**2), str(103**2)]
    assert len(verifiers_tasks(NAME, size=3)) == 3
    assert verifiers_tasks(NAME, arguments={"digits": 2})[0].answer == "100"
    assert len({task.id for task in [*tasks, *verifiers_tasks(NAME, "test")]}) == 6


def test_ctrl_c_stays_the_runs(installed: None) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    verifiers_tasks(NAME)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("said, reward", [("10000", 1.0), ("10001", 0.0)])
def test_one_turn_is_token_for_token_what_was_said(installed: None, model: Path, said: str, reward: float) -> None:
    (task, *_) = verifiers_tasks(NAME)
    shown = demonstration(PIECES, [("user", "100*100="), ("assistant", said)], tools=False)
    episode = conversed(Agent(solve=verifiers_agent), model, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == reward
    same_tokens(episode, shown)


def tool_talk() -> Any:
    turns = [("user", "100*100="), ("assistant", calling(TOOL, ARGUMENT, "100*100")), ("tool", "10000"), ("assistant", "10000")]
    return demonstration(PIECES, turns, tools=True)


def test_a_conversation_with_tools_is_token_for_token_what_was_said(installed: None, model: Path) -> None:
    (task, *_) = verifiers_tasks(NAME, arguments={"tools": True})
    episode = conversed(Agent(solve=verifiers_agent), model, task, tool_talk())
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 1.0
    same_tokens(episode, tool_talk())


def test_a_conversation_that_outgrows_the_context_is_judged_as_it_is(
    installed: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task, *_) = verifiers_tasks(NAME, arguments={"tools": True})
    shown = tool_talk()
    monkeypatch.setattr(Script, "context", len(shown) - 6)  # of the last turn's prompt there is no room
    episode = conversed(Agent(solve=verifiers_agent), model, task, shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == 0.0
    assert len(episode.trajectories) == 1


def test_a_rollout_that_the_environment_gave_up_failed(installed: None, model: Path) -> None:
    (task, *_) = verifiers_tasks(NAME)

    async def run() -> Any:
        workflow = Agent(solve=verifiers_agent).setup(load_tokenizer(model))
        try:
            return await run_episode(workflow, task, Script([]), 60)  # type: ignore[arg-type]
        finally:
            await workflow.close()

    outcome = asyncio.run(run()).outcome
    assert isinstance(outcome, Failed)
    assert "aborted the rollout" in outcome.error


def test_what_cannot_work_is_a_sentence(installed: None) -> None:
    with pytest.raises(ConfigError, match=r"verifiers_tasks\.split"):
        verifiers_tasks(NAME, "all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"verifiers_tasks\.size"):
        verifiers_tasks(NAME, size=0)
    with pytest.raises(UserError, match=r"'no-such-environment' cannot be loaded"):
        verifiers_tasks("no-such-environment")
    with pytest.raises(UserError, match=r"'products-of-ours' cannot be loaded .*number"):
        verifiers_tasks(NAME, arguments={"number": 1})


def test_without_the_package_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"needs the package verifiers"):
        verifiers_tasks("any")
