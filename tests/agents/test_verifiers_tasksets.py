"""Tasksets of verifiers 0.4, played by their own harness through the gateway."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents import verifiers_tasksets as module
from areal_x.agents.agent import Agent
from areal_x.agents.verifiers_environment import verifiers_agent, verifiers_tasks
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.types import Failed, Scored
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from examples.tools.warm_start import PIECES
from tests.examples.running import Script, conversed, same_tokens

NAME = "products_taskset"
TASKSET = """
import verifiers.v1 as vf
from verifiers.v1.utils.decorators import reward

class Config(vf.TasksetConfig):
    digits: int = 3
    broken: bool = False

class Data(vf.TaskData):
    answer: str

class Product(vf.Task[Data, vf.State, vf.TaskConfig]):
    @reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "broken":
            raise ValueError("nothing can be judged")
        return float(trace.last_reply == self.data.answer)

class Products(vf.Taskset[Product, Config]):
    def load(self):
        for n in range(10 ** (self.config.digits - 1), 10 ** (self.config.digits - 1) + 4):
            yield Product(Data(prompt=f"{n}*{n}=", answer="broken" if self.config.broken else str(n * n)), self.config.task)

__all__ = ["Products"]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("verifiers")
    if not module.installed():
        pytest.skip("this version of verifiers has no tasksets")
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(textwrap.dedent(TASKSET))
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop(NAME, None)
    module._loaded.cache_clear()


@pytest.mark.usefixtures("taskset")
def test_tasks_are_the_tasksets() -> None:
    tasks = verifiers_tasks(NAME)
    assert [task.prompt for task in tasks] == [f"{n}*{n}=" for n in (100, 101, 102, 103)]
    assert [task.prompt for task in verifiers_tasks(NAME, size=2, arguments={"taskset": {"digits": 2}})] == ["10*10=", "11*11="]


@pytest.mark.usefixtures("taskset")
@pytest.mark.parametrize(("said", "reward"), [("10000", 1.0), ("10001", 0.0)])
def test_one_turn_is_token_for_token_what_was_said(model: Path, said: str, reward: float) -> None:
    (task, *_) = verifiers_tasks(NAME)
    shown = demonstration(PIECES, [("user", "100*100="), ("assistant", said)], tools=False)
    episode = conversed(Agent(solve=verifiers_agent), model, task, shown)
    assert isinstance(episode.outcome, Scored), episode.outcome
    assert episode.outcome.reward == reward
    same_tokens(episode, shown)


@pytest.mark.usefixtures("taskset")
def test_an_episode_that_the_environment_gave_up_failed(model: Path) -> None:
    (task, *_) = verifiers_tasks(NAME, arguments={"taskset": {"broken": True}})
    shown = demonstration(PIECES, [("user", "100*100="), ("assistant", "10000")], tools=False)

    async def run() -> Any:
        workflow = Agent(solve=verifiers_agent).setup(load_tokenizer(model))
        try:
            return await run_episode(workflow, task, Script([shown.tokens[shown.mask]]), 60)  # type: ignore[arg-type]
        finally:
            await workflow.close()

    outcome = asyncio.run(run()).outcome
    assert isinstance(outcome, Failed)
    assert "nothing can be judged" in outcome.error


@pytest.mark.usefixtures("taskset")
def test_what_cannot_work_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"'no-such-taskset' cannot be loaded"):
        verifiers_tasks("no-such-taskset")
    with pytest.raises(UserError, match=r"cannot be loaded .*digit"):
        verifiers_tasks(NAME, arguments={"taskset": {"digit": 2}})
    with pytest.raises(UserError, match=r"no setting `split`"):
        verifiers_tasks(NAME, "test")
