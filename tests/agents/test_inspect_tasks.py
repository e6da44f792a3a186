"""Samples of a real inspect-ai task, evaluated in a process of their own through the gateway."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents.agent import Agent
from areal_x.agents.inspect_tasks import inspect_agent, inspect_tasks
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.types import Failed, Scored
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from examples.tools.warm_start import ARGUMENT, PIECES, TOOL, calling
from tests.examples.running import ROOT, Script, conversed, same_tokens

FILE = f"{Path(__file__).with_name('inspect_products.py')}@products"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def python() -> str:
    """The Python that has inspect-ai, which needs other versions of packages than a run may have."""
    return os.environ.get("INSPECT_PYTHON") or str(ROOT / ".venv-inspect" / "bin" / "python")


@pytest.fixture
def installed(python: str) -> None:
    if not Path(python).is_file():
        pytest.skip("needs inspect-ai in a Python of its own: make benchmarks")


@pytest.mark.usefixtures("installed")
def test_a_sample_is_token_for_token_what_was_said_and_has_its_scorers_score(model: Path, python: str) -> None:
    tasks = inspect_tasks(FILE, size=2, python=python)
    assert [task.metadata["sample"] for task in tasks] == ["of-100", "of-101"]
    for said, reward in (("10000", 1.0), ("10001", 0.0)):
        shown = demonstration(PIECES, [("user", "100*100="), ("assistant", said)], tools=False)
        episode = conversed(Agent(solve=inspect_agent), model, tasks[0], shown)
        assert isinstance(episode.outcome, Scored), episode.outcome
        assert episode.outcome.reward == reward
        same_tokens(episode, shown)


@pytest.mark.usefixtures("installed")
def test_its_solver_calls_tools(model: Path, python: str) -> None:
    (task, *_) = inspect_tasks(FILE, {"tools": True, "digits": 3}, python=python)
    turns = [("user", "100*100="), ("assistant", calling(TOOL, ARGUMENT, "100*100")), ("tool", "10000"), ("assistant", "10000")]
    shown = demonstration(PIECES, turns, tools=True)
    episode = conversed(Agent(solve=inspect_agent), model, task, shown)
    assert isinstance(episode.outcome, Scored), episode.outcome
    assert episode.outcome.reward == 1.0
    same_tokens(episode, shown)


@pytest.mark.usefixtures("installed")
def test_a_sample_that_fails_is_a_failed_episode_with_the_reason(model: Path, python: str) -> None:
    (task, *_) = inspect_tasks(FILE, scorer="other", python=python)
    shown = demonstration(PIECES, [("user", "100*100="), ("assistant", "10000")], tools=False)

    async def run() -> Any:
        workflow = Agent(solve=inspect_agent).setup(load_tokenizer(model))
        try:
            return await run_episode(workflow, task, Script([shown.tokens[shown.mask]]), 100)  # type: ignore[arg-type]
        finally:
            await workflow.close()

    outcome = asyncio.run(run()).outcome
    assert isinstance(outcome, Failed)
    assert "no score 'other'; there are exact" in outcome.error


def test_what_cannot_work_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"inspect_tasks\.size"):
        inspect_tasks(FILE, size=0)
    with pytest.raises(UserError, match="no-such-python"):
        inspect_tasks(FILE, python="no-such-python")
    with pytest.raises(UserError, match="install inspect-ai and the task where"):
        inspect_tasks("no_such_task", python=sys.executable)
