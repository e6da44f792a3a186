"""Episodes that workers on other machines answer are those of an agent here."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_x.agents.agent import Agent
from areal_x.agents.client import Session
from areal_x.agents.worker import ProgramAttempt
from areal_x.rollout.episodes import TRAINING
from tests.agents.giving import Giving, adding, taken, until_soon
from tests.agents.test_agent import ask, run
from tests.rewards.reward_functions import length


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_workers_share_the_episodes_of_a_run_and_each_is_answered_once(tokenizer, tmp_path):
    async def main():
        seen = Counter()

        def solve(task, base_url, api_key):
            seen[task.id] += 1
            ask(base_url, api_key, task.prompt)
            assert task.metadata["hints"] == ["a", "b"]
            return float(task.answer)

        async with Giving(tokenizer, tmp_path, groups=8) as giving:
            assert stat.S_IMODE(giving.address.stat().st_mode) == 0o600
            async with giving.working(solve) as one, giving.working(solve) as other:
                for step in (1, 2):
                    groups = await taken(giving)
                    assert all(group.rewards == [float(group.task.answer)] for group in groups)
                    giving.runner.published(step + 1)
                assert giving.runner.stats().failed == 0
                assert max(seen.values()) == 1
                await until_soon(lambda: one.answered + other.answered >= 16)

    asyncio.run(main())


def test_the_tokens_of_a_workers_agent_are_what_is_trained_on(tokenizer, tmp_path):
    """Bit by bit those of an agent of the run's own."""

    async def main():
        async with Giving(tokenizer, tmp_path, groups=1) as giving, giving.working(adding(calls=2)):
            (group,) = await taken(giving)
            return group

    group = asyncio.run(main())
    (here,) = run(Agent(solve=adding(calls=2)), tokenizer, [group.task], key=(0, TRAINING, group.ticket))
    (there,) = group.episodes
    assert len(there.trajectories) == len(here.trajectories) > 0
    for a, b in zip(there.trajectories, here.trajectories, strict=True):
        for name in ("tokens", "mask", "logprobs"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_results_errors_and_rewards_of_the_session_are_those_of_an_agent_here(tokenizer, tmp_path):
    def solve(task, base_url, api_key):
        kind = int(task.id.partition("-")[2]) % 6
        if kind != 0:
            ask(base_url, api_key, task.prompt)
        session = Session(base_url.removesuffix("/v1"), api_key)
        if kind == 1:
            session.reward(0.25)
            return None
        if kind == 2:
            session.end(0.5)
            return None
        if kind == 3:
            raise LookupError("no such \x1b[2Jpage")
        return {0: 1.0, 4: float("nan"), 5: "three"}[kind]

    async def main():
        said = []
        async with Giving(tokenizer, tmp_path, groups=9, failed_groups=100, reward=length) as giving:
            async with giving.working(solve, message=said.append):
                rewards = {reward for group in await taken(giving) for reward in group.rewards}
            errors = list(giving.runner.stats().errors)
        assert {0.25, 0.5} <= rewards <= {0.25, 0.5, 5.0}
        assert {error.partition(":")[0] for error in errors} == {
            "the agent never called the model",
            "the agent returned nan for its reward",
            "LookupError",
        }
        assert not any("\x1b" in line for line in said)

    asyncio.run(main())


def test_a_result_beyond_bounds_fails_its_episode_alone(tokenizer, tmp_path):
    def solve(task, base_url, api_key):
        ask(base_url, api_key, task.prompt)
        return "x" * (2 << 20)

    async def main():
        async with Giving(tokenizer, tmp_path, groups=1, failed_groups=100, reward=length) as giving, giving.working(solve):
            await until_soon(lambda: giving.runner.stats().failed)
            assert list(giving.runner.stats().errors) == ["the agent's result is larger than 1 MB"]

    asyncio.run(main())


def test_a_program_is_an_agent_too_and_sees_no_answer_and_no_key_of_the_run(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_X_GATEWAY_KEY", "secret-of-the-run")
    code = (
        "import json, os, urllib.request as u; e = os.environ; t = json.loads(e['AREAL_X_TASK'])\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': t['prompt']}]}).encode()\n"
        "head = {'authorization': 'Bearer ' + e['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
        "u.urlopen(u.Request(e['OPENAI_BASE_URL'] + '/chat/completions', body, head)).read()\n"
        "print(sorted(t), 'secret-of-the-run' in str(e))"
    )

    async def main():
        giving = Giving(tokenizer, tmp_path, groups=1, reward=length)
        async with giving, giving.working(ProgramAttempt((sys.executable, "-c", code))):
            (group,) = await taken(giving)
        assert group.rewards == [float(len("['id', 'metadata', 'prompt'] False\n"))]

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        {"result": True},
        {"result": [1.0]},
        {"result": 1.0, "reward": 2.0},
        {"error": "x" * 20_000},
    ],
)
def test_an_answer_of_another_form_is_refused(tokenizer, tmp_path, body):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1) as giving:
            told = await giving.post("work")
            answer = await giving.post(f"work/{told['lease']}/answer", body)
            assert answer["error"]["code"] in ("invalid_value", "unsupported_parameter")
            assert not giving.workflow.board._leases[told["lease"]].answered.done()
            answer = await giving.post("work", {"wait_seconds": 3600})
            assert answer["error"]["param"] == "wait_seconds"

    asyncio.run(main())
