"""Episodes in environments of NeMo Gym: of a small server with its protocol and, where the package is, of its own servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.agents.agent import Agent
from areal_x.agents.chat.credit import Credit
from areal_x.agents.nemo_gym import nemo_gym_agent, nemo_gym_task
from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import Completion, Request
from areal_x.rollout.episode import run_episode
from areal_x.tasks.datasets import load_dataset
from areal_x.types import Episode, Failed, Scored, Task
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, demonstration
from examples.tiny.model import encode, write_model
from tests.agents.json_server import Asked, serving
from tests.agents.nemo_gym_server import steps, tools
from tests.examples.running import ROOT, Script, conversed, same_tokens, spoken

PIECES = (*string.ascii_letters, *string.digits, *" .,;:?!{}[]()\"'_-=+*/", *FRAME)
FUNCTIONS = {"increment_counter": {"count": {"type": "integer", "description": ""}}, "get_counter_value": {}}


@dataclass(frozen=True)
class Addresses:
    tools: str
    steps: str


@pytest.fixture(scope="module", params=["ours", "nemo-gym"])
def servers(request: pytest.FixtureRequest) -> Iterator[Addresses]:
    with ExitStack() as stack:
        if request.param == "ours":
            yield Addresses(*(stack.enter_context(serving(routes()))[0] for routes in (tools, steps)))
            return
        python = os.environ.get("NEMO_GYM_PYTHON") or str(ROOT / ".venv-nemo-gym" / "bin" / "python")
        if not Path(python).is_file():
            pytest.skip("needs nemo-gym in a Python of its own: make benchmarks")
        script = Path(__file__).with_name("nemo_gym_examples.py")
        process = subprocess.Popen([python, script], stdout=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        yield Addresses(*process.stdout.readline().split())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    return tmp_path


def counting(url: str, expected: int = 6, **more: Any) -> Task:
    """A task of the package's example: its counter begins at 3."""
    given = [
        {
            "type": "function",
            "name": name,
            "description": "",
            "strict": True,
            "parameters": {"type": "object", "properties": of, "required": list(of), "additionalProperties": False},
        }
        for name, of in FUNCTIONS.items()
    ]
    params = {"input": [{"role": "user", "content": "add 1 then add 2"}], "tools": given}
    row = {"responses_create_params": params, "initial_count": 3, "expected_count": expected, **more}
    return nemo_gym_task(row, "t", base_url=url)


def asking(url: str, **more: Any) -> Task:
    params = {"input": "capital of France?"}
    row = {"responses_create_params": params, "follow_ups": ["and its tower?"], "expected_answer": "Eiffel"}
    return nemo_gym_task(row, "t", base_url=url, **more)


def calling(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def talk(*turns: tuple[str, str], tools: bool = True) -> Any:
    return demonstration(PIECES, turns, tools=tools)


def added(*counts: int) -> list[tuple[str, str]]:
    turns = [("user", "add 1 then add 2")]
    for count in counts:
        turns += [("assistant", calling("increment_counter", {"count": count})), ("tool", '{"success":true}')]
    return [*turns, ("assistant", "done")]


@pytest.mark.parametrize(("counts", "reward"), [((1, 2), 1.0), ((1, 1), 0.0)])
def test_tools_change_the_session_that_is_verified(
    servers: Addresses, model: Path, counts: tuple[int, ...], reward: float
) -> None:
    shown = talk(*added(*counts))
    episode = conversed(Agent(solve=nemo_gym_agent), model, counting(servers.tools), shown)
    assert reward_of(episode) == reward
    same_tokens(episode, shown)


def test_sessions_at_once_are_apart(servers: Addresses, model: Path) -> None:
    async def run() -> list[Any]:
        ready = Agent(solve=nemo_gym_agent).setup(load_tokenizer(model))
        attempts = [(6, (1, 2)), (7, (2, 2)), (6, (3,))]
        try:
            return await asyncio.gather(
                *(ready.run(counting(servers.tools, end), Script(spoken(talk(*added(*counts))))) for end, counts in attempts)
            )
        finally:
            await ready.close()

    assert [reward_of(episode) for episode in asyncio.run(run())] == [1.0] * 3


def test_what_a_server_refuses_the_model_reads(servers: Addresses, model: Path) -> None:
    """And tools that the row does not have are not called, as the server's own paths are beside them."""
    calls = [calling("increment_counter", {"count": "one"}), calling("verify", {})]
    episode, prompts = answered(model, counting(servers.tools, 3), *calls, "done")
    assert reward_of(episode) == 1.0
    assert "valid integer" in prompts[1]
    assert prompts[2].endswith('<tool_response>{"error": "there is no tool \'verify\'"}</tool_response><end><assistant>')


def test_two_calls_at_once_are_made_in_their_order(servers: Addresses, model: Path) -> None:
    both = calling("increment_counter", {"count": 2}) + calling("get_counter_value", {})
    episode, prompts = answered(model, counting(servers.tools, 5), both, "done")
    assert reward_of(episode) == 1.0
    assert '<tool_response>{"count":5}</tool_response>' in prompts[1]


def test_steps_are_observations_until_the_end(servers: Addresses, model: Path) -> None:
    shown = talk(
        ("user", "capital of France?"),
        ("assistant", "Paris"),
        ("user", "and its tower?"),
        ("assistant", "the Eiffel"),
        tools=False,
    )
    episode = conversed(Agent(solve=nemo_gym_agent), model, asking(servers.steps), shown)
    assert reward_of(episode) == 1.0
    same_tokens(episode, shown)


def test_more_turns_than_allowed_are_scored_as_they_are(servers: Addresses, model: Path) -> None:
    task = asking(servers.steps, turns=1)
    episode, _ = answered(model, task, "the Eiffel")
    assert reward_of(episode) == 0.0  # it would have been asked again
    once = nemo_gym_task({**task.metadata["row"], "follow_ups": []}, "t", servers.steps, turns=1)
    episode, _ = answered(model, once, "the Eiffel")
    assert reward_of(episode) == 1.0


def test_a_conversation_that_outgrows_the_context_is_verified_as_it_is(
    servers: Addresses, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = talk(*added(1, 2))
    monkeypatch.setattr(Script, "context", len(shown) - 4)  # of the last turn's prompt there is no room
    episode = conversed(Agent(solve=nemo_gym_agent), model, counting(servers.tools), shown)
    assert reward_of(episode) == 1.0
    monkeypatch.setattr(Script, "context", 4)
    failed = played(model, counting(servers.tools), Script([]))
    assert isinstance(failed.outcome, Failed)
    assert "context_length_exceeded" in failed.outcome.error


def test_each_step_s_reward_is_its_reply_s(model: Path) -> None:
    sent: list[Any] = []

    def reset(_: Asked) -> tuple[int, Any]:
        return 200, {"observation": "go", "info": {"supports_explicit_close": True, "supports_step_idempotency": True}}

    def step(asked: Asked) -> tuple[int, Any]:
        sent.append(asked.body["_ng_step_request_id"])
        return 200, {"observation": "more", "reward": float(len(sent)), "terminated": len(sent) == 2, "info": {}}

    with serving({"/reset": reset, "/step": step, "/close": lambda _: (200, {})}) as (url, asked):
        workflow = Agent(solve=nemo_gym_agent, credit=Credit("given"))
        shown = talk(
            ("user", "capital of France?"),
            ("user", "go"),
            ("assistant", "one"),
            ("user", "more"),
            ("assistant", "two"),
            tools=False,
        )
        episode = conversed(workflow, model, asking(url), shown)
    assert reward_of(episode) == 3.0
    (trajectory,) = episode.trajectories
    assert trajectory.token_rewards is not None
    rewards = trajectory.token_rewards.copy()
    rewards[-1] += trajectory.reward  # what algorithms with rewards of tokens do
    given = np.flatnonzero(rewards)
    np.testing.assert_array_equal(rewards[given], [1.0, 2.0])
    np.testing.assert_array_equal(given, np.flatnonzero(np.diff(trajectory.mask.astype(int), append=0) == -1))
    assert [one.path for one in asked] == ["/seed_session", "/reset", "/step", "/step", "/close"]
    assert len(set(sent)) == 2


def test_an_episode_that_was_not_measured_failed(model: Path) -> None:
    with serving(tools()) as (url, asked):
        lost = played(model, counting(url, lost="the judge is away"), Script(spoken(talk(*added(1, 2)))))
        assert isinstance(lost.outcome, Failed)
        assert "could not measure the episode: the judge is away" in lost.outcome.error
    assert [one.path for one in asked] == ["/seed_session", "/increment_counter", "/increment_counter", "/verify"]


def test_a_server_that_is_away_or_another_is_a_failure_with_its_address(model: Path) -> None:
    away = played(model, counting("http://127.0.0.1:9"), Script([]))
    assert isinstance(away.outcome, Failed)
    assert "http://127.0.0.1:9/seed_session gives no answer" in away.outcome.error
    with serving({}) as (url, _):
        other = played(model, counting(url), Script([]))
    assert isinstance(other.outcome, Failed)
    assert f"{url}/reset answers with 404" in other.outcome.error


def test_rows_are_records_of_a_dataset(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "what is"}, {"type": "input_image", "image_url": "data:"}]
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    items = [{"role": "developer", "content": "be short"}, {"role": "user", "content": parts}, call]
    file = tmp_path / "train.jsonl"
    rows: list[dict[str, Any]] = [{"responses_create_params": {"input": given}, "label": 7} for given in ("2+2", items)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = load_dataset(str(file), to_task=partial(nemo_gym_task, base_url="http://127.0.0.1:1"))
    assert [task.prompt for task in tasks] == [
        "2+2",
        [{"role": "developer", "content": "be short"}, {"role": "user", "content": "what is\n[input_image]"}],
    ]
    assert tasks[0].metadata["row"] == rows[0]


@pytest.mark.parametrize(
    ("row", "given", "wrong"),
    [
        ({}, {}, "no responses_create_params"),
        ({"responses_create_params": {"input": []}}, {}, "no responses_create_params"),
        ({"responses_create_params": {"input": "a"}}, {"base_url": "127.0.0.1:1"}, "nemo_gym_task.base_url"),
        ({"responses_create_params": {"input": "a"}}, {"turns": 0}, "nemo_gym_task.turns"),
        ({"responses_create_params": {"input": "a"}}, {"seconds": 0}, "nemo_gym_task.seconds"),
    ],
)
def test_what_cannot_work_is_a_sentence(row: dict[str, Any], given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UserError, match=re.escape(wrong)):
        nemo_gym_task(row, "t", **{"base_url": "http://127.0.0.1:1", **given})


def test_without_httpx_it_is_a_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match="pip install httpx"):
        asyncio.run(nemo_gym_agent(counting("http://127.0.0.1:1"), "http://127.0.0.1:1/v1", "key"))


def reward_of(episode: Any) -> float:
    assert isinstance(episode.outcome, Scored), episode.outcome
    return episode.outcome.reward


class Listening(Script):
    """Keeps the prompts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__([encode(PIECES, f"{text}<end>") for text in texts])
        self.prompts: list[str] = []

    async def generate(self, request: Request) -> Completion:
        self.prompts.append("".join(("", "<end>", *PIECES)[token] for token in request.tokens))
        return await super().generate(request)


def answered(model: Path, task: Task, *texts: str) -> tuple[Episode, list[str]]:
    """The episode in which the model says these texts, and its prompts."""
    engine = Listening(texts)
    return played(model, task, engine), engine.prompts


def played(model: Path, task: Task, engine: Script) -> Any:
    async def run() -> Any:
        workflow = Agent(solve=nemo_gym_agent).setup(load_tokenizer(model))
        try:
            return await run_episode(workflow, task, engine, 60)  # type: ignore[arg-type]
        finally:
            await workflow.close()

    return asyncio.run(run())
