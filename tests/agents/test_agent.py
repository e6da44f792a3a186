"""Episodes of agents that the run starts: their results, their rewards, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_x.agents.agent import Agent
from areal_x.agents.agent_process import AgentProcess
from areal_x.agents.chat.credit import Credit
from areal_x.agents.external_program import wait_for_exit
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError, SamplingParams
from areal_x.rollout.episode import run_episode
from areal_x.rollout.episodes import EpisodeEngine
from areal_x.runtime import guard
from areal_x.types import Failed, Scored, Task, TimedOut
from tests.rewards.reward_functions import length
from tests.rollout.fakes import FakeEngine

TASK = Task("sum", "1+2=", "3", {"hint": "add"})


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def ask(base_url, key, content="1+2=", **more):
    """Requests a completion by the standard library, as any client does."""
    body = {"model": "policy", "messages": [{"role": "user", "content": content}], **more}
    return post(f"{base_url}/chat/completions", key, body)


def post(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)


def run(workflow, tokenizer, tasks=(TASK,), engine=None, seconds=60.0, key=(0, 0)):
    """Runs one episode of each task concurrently, and closes everything."""
    engine = engine or FakeEngine(context=512)

    async def all_of_them():
        ready = workflow.setup(tokenizer)
        try:
            views = [EpisodeEngine(engine, (*key, i), lambda _: None, lambda _: None) for i, _ in enumerate(tasks)]
            return await asyncio.gather(*(run_episode(ready, t, v, seconds) for t, v in zip(tasks, views, strict=True)))
        finally:
            await ready.close()

    engine.version = 3
    return asyncio.run(all_of_them())


def episode(solve, tokenizer, **more):
    settings = {name: more.pop(name) for name in ("reward", "limits", "credit", "sampling") if name in more}
    return run(Agent(solve=solve, **settings), tokenizer, **more)[0]


def asking(times=1, reward=1.0):
    def solve(task, base_url, api_key):
        for _ in range(times):
            ask(base_url, api_key, task.prompt)
        return reward

    return solve


def test_what_an_agent_said_is_what_is_trained_on(tokenizer):
    engine = FakeEngine(context=512)
    of_agent = episode(asking(), tokenizer, engine=engine)
    (trajectory,) = of_agent.trajectories
    (request,) = engine.requests
    said = np.random.default_rng(request.seed).integers(2, 40, 5)
    assert of_agent.outcome.reward == 1.0
    np.testing.assert_array_equal(trajectory.tokens, [*tokenizer.encode("1+2="), *said])
    np.testing.assert_array_equal(trajectory.mask, [False] * 4 + [True] * 5)
    np.testing.assert_array_equal(trajectory.versions, [-1] * 4 + [3] * 5)


def test_an_async_agent_runs_beside_the_engines_loop(tokenizer):
    threads = []

    async def solve(task, base_url, api_key):
        threads.append(threading.current_thread().name)
        await asyncio.to_thread(ask, base_url, api_key)
        return 0.5

    assert episode(solve, tokenizer).outcome.reward == 0.5
    assert threads == ["agents"]


def test_agents_that_block_do_so_all_at_once(tokenizer):
    together = threading.Barrier(60)  # more than asyncio's own threads on any machine

    def solve(task, base_url, api_key):
        together.wait(30)
        ask(base_url, api_key, task.prompt)
        return 1.0

    tasks = [Task(str(i), f"{i}+{i}=") for i in range(together.parties)]
    assert [one.outcome.reward for one in run(Agent(solve=solve), tokenizer, tasks)] == [1.0] * together.parties


def test_many_agents_are_not_mixed_up(tokenizer):
    async def solve(task, base_url, api_key):
        await asyncio.to_thread(ask, base_url, api_key, task.prompt)
        return float(task.id)

    tasks = [Task(str(i), f"{i}+{i}=") for i in range(24)]
    episodes = run(Agent(solve=solve), tokenizer, tasks)
    for task, of_task in zip(tasks, episodes, strict=True):
        (trajectory,) = of_task.trajectories
        assert of_task.outcome.reward == float(task.id)
        assert tokenizer.decode(trajectory.tokens[~trajectory.mask].tolist()) == task.prompt


@pytest.mark.parametrize(
    ("solve", "error"),
    [
        (lambda *_: 1.0, "never called the model"),
        (asking(reward=None), "gave no reward"),
        (asking(reward="a text"), "gave no reward"),
        (asking(reward=True), "gave no reward"),
        (asking(reward=float("nan")), "returned nan for its reward"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_agent_that_goes_wrong_fails_its_episode_with_a_reason(tokenizer, solve, error):
    failed = episode(solve, tokenizer)
    assert isinstance(failed.outcome, Failed)
    assert error in failed.outcome.error
    assert failed.trajectories == ()


def test_an_agent_that_hangs_is_timed_out_and_cancelled(tokenizer):
    cancelled = threading.Event()

    async def solve(task, base_url, api_key):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    assert isinstance(episode(solve, tokenizer, seconds=0.3).outcome, TimedOut)
    assert cancelled.is_set()


def test_a_session_that_is_over_ends_an_agent_that_goes_on(tokenizer):
    async def solve(task, base_url, api_key):
        await asyncio.to_thread(ask, base_url, api_key)
        await asyncio.Event().wait()

    limits = SessionLimits(seconds=0.5)
    assert isinstance(episode(solve, tokenizer, limits=limits).outcome, TimedOut)


def test_rewards_that_were_given_to_the_session_count(tokenizer):
    def solve(task, base_url, api_key):
        ask(base_url, api_key)
        post(f"{base_url}/reward", api_key, {"reward": 0.25})

    assert episode(solve, tokenizer).outcome.reward == 0.25


def test_an_agent_may_end_its_session_itself(tokenizer):
    def solve(task, base_url, api_key):
        ask(base_url, api_key)
        post(f"{base_url}/end", api_key, {"reward": 0.75})
        return 0.0

    assert episode(solve, tokenizer).outcome.reward == 0.75


@pytest.mark.parametrize("said", ["four", None])
def test_a_reward_function_judges_what_the_agent_gave_or_the_model_said_last(tokenizer, said):
    of_agent = episode(asking(2, said), tokenizer, reward=length)
    last = of_agent.trajectories[-1]
    wanted = said if said is not None else tokenizer.decode(last.tokens[last.mask].tolist(), skip_special_tokens=True)
    assert of_agent.outcome.reward == float(len(wanted))


def test_credit_is_the_workflows(tokenizer):
    of_agent = episode(asking(2), tokenizer, credit=Credit(export="individual", how="discounted", discount=0.5))
    first, last = of_agent.trajectories
    np.testing.assert_array_equal(first.credit[first.mask], 0.5)
    assert last.credit is None or (last.credit[last.mask] == 1).all()


def test_an_engine_that_is_lost_ends_the_run_and_not_only_the_episode(tokenizer):
    engine = FakeEngine(context=512)
    engine.error = EngineError("it burnt")
    with pytest.raises(EngineError, match="it burnt"):
        episode(asking(), tokenizer, engine=engine)


def test_evaluation_asks_greedily(tokenizer):
    engine = FakeEngine(context=512)

    async def greedily():
        ready = Agent(solve=asking(), sampling=SamplingParams(temperature=0.7)).setup(tokenizer)
        view = EpisodeEngine(engine, (0,), lambda _: None, lambda _: None)
        try:
            await run_episode(ready.greedy(), TASK, view, 60)
            await run_episode(ready, TASK, view, 60)
        finally:
            await ready.close()

    asyncio.run(greedily())
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 0.7]


def test_an_agent_that_is_no_function_is_refused():
    with pytest.raises(UserError, match=r"agent\.solve = 'solve' cannot work: it must be a function"):
        Agent(solve="solve")


# ---- programs

CALL = """
import json, os, sys, urllib.request
base, key, task = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], json.loads(os.environ["AREAL_X_TASK"])
def post(path, **body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(base + path, json.dumps(body).encode(), headers)))
def say(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", model="m", messages=messages)["choices"][0]["message"]["content"]
"""


def program(tmp_path: Path, code: str) -> tuple[str, ...]:
    file = tmp_path / "agent.py"
    file.write_text(CALL + textwrap.dedent(code))
    return (sys.executable, str(file))


def of_process(tmp_path, tokenizer, code, seconds=60.0, words=(), **more):
    workflow = AgentProcess(command=(*program(tmp_path, code), *words), **more)
    return run(workflow, tokenizer, seconds=seconds)[0]


def test_a_program_finds_its_task_and_its_address_and_is_judged_by_what_it_printed(tmp_path, tokenizer):
    code = "say(task['prompt']); print(task, sys.argv[1:])"
    of_program = of_process(tmp_path, tokenizer, code, reward=length, words=("{id}", "<{prompt}>"))
    told = {"id": "sum", "prompt": "1+2=", "metadata": {"hint": "add"}}  # and not the answer
    assert of_program.outcome.reward == len(f"{told} ['sum', '<1+2=>']\n")
    assert tokenizer.decode(of_program.trajectories[0].tokens[:4].tolist()) == "1+2="


def test_a_program_may_reward_itself(tmp_path, tokenizer):
    code = """
    sys.path.insert(0, os.environ["ROOT"])
    from areal_x.agents import session
    with session() as episode:
        say("1+1=")
        episode.reward(0.5)
        say("2+2=")
        episode.reward(0.25)
    """
    root = str(Path(__file__).parents[2])
    of_program = of_process(tmp_path, tokenizer, code, environment={"ROOT": root})
    assert of_program.outcome.reward == 0.75
    assert len(of_program.trajectories) == 2


def test_a_program_sees_of_the_runs_environment_what_is_named(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "for the search")
    monkeypatch.setenv("CLUSTER_TOKEN", "of the run")
    monkeypatch.setenv("LC_TIME", "C")
    code = f"say('1'); open({str(tmp_path / 'names')!r}, 'w').write(json.dumps(list(os.environ)))"
    of_process(tmp_path, tokenizer, code, reward=length, variables=("SEARCH_KEY",), environment={"MORE": "1"})
    names = set(json.loads((tmp_path / "names").read_text()))
    assert {"PATH", "HOME", "LC_TIME", "SEARCH_KEY", "MORE", "AREAL_X_TASK", "OPENAI_API_KEY"} <= names
    assert "CLUSTER_TOKEN" not in names
    with pytest.raises(ConfigError, match=r"agent_process\.variables"):
        AgentProcess(command=("x",), variables="SEARCH_KEY")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("say('1'); sys.exit('no luck')", "exit status 1: no luck"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("print(1)", "never called the model"),
        ("say('1'); print(1)", "gave no reward"),
    ],
)
def test_a_program_that_goes_wrong_fails_its_episode_with_a_reason(tmp_path, tokenizer, code, error):
    outcome = of_process(tmp_path, tokenizer, code).outcome
    assert isinstance(outcome, Failed)
    assert error in outcome.error


def test_a_command_that_is_not_there_is_refused_before_the_run(tokenizer):
    with pytest.raises(UserError, match="a program that exists: no 'no-such-command' was found"):
        AgentProcess(command=("no-such-command",)).setup(tokenizer)


def test_a_command_that_cannot_be_run_fails_its_episode(tmp_path, tokenizer):
    (tmp_path / "text").write_text("no program")
    outcome = run(AgentProcess(command=("./text",), directory=str(tmp_path)), tokenizer)[0].outcome
    assert "exit status 127: ./text: Permission denied" in outcome.error


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize("ends", ["", "import time; time.sleep(1000)"], ids=["done", "hangs"])
def test_nothing_that_a_program_started_outlives_its_episode(tmp_path, tokenizer, ends):
    pids = tmp_path / "pids"
    code = f"""
    import subprocess, time
    left = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(1000)"])
    open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{left.pid}}")
    say("1")
    {ends}
    """
    limits = SessionLimits(idle_seconds=5 if ends else 600)  # its start counts too
    outcome = of_process(tmp_path, tokenizer, code, reward=length, limits=limits).outcome
    assert type(outcome) is (TimedOut if ends else Scored)
    for pid in map(int, pids.read_text().split()):
        assert is_gone(pid)


def test_only_the_end_of_what_a_program_prints_is_kept(tmp_path, tokenizer):
    code = "say('1'); print('x' * 5000)"
    assert of_process(tmp_path, tokenizer, code, reward=length, output_kilobytes=1).outcome.reward == 1024


def test_a_command_of_one_text_is_refused():
    with pytest.raises(UserError, match=r'agent_process\.command = .* must be a tuple of words, as \("node", "agent.mjs"\)'):
        AgentProcess(command="node agent.mjs")


def test_the_same_questions_with_the_same_seeds_give_the_same_tokens_through_every_door(tmp_path, tokenizer):
    in_process = episode(asking(2), tokenizer)
    as_program = of_process(tmp_path, tokenizer, "say('1+2='); say('1+2='); print(1)", reward=length)
    for a, b in zip(in_process.trajectories, as_program.trajectories, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_an_exit_status_is_known_whenever_the_program_ends_beside_the_signals_that_wake_its_guard(monkeypatch):
    monkeypatch.setattr(guard, "POLL_SECONDS", 0.002)

    async def one():
        return await wait_for_exit(await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.02; exit 3"))

    async def many():
        return await asyncio.gather(*(one() for _ in range(30)))

    assert set(asyncio.run(many())) == {3}
