"""A judge behind a real server of this project, behind one that fails as servers do, and the run's own engine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.agents import judge as module
from areal_x.agents.client import session
from areal_x.agents.judge import LLMJudge, question_of
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.rollout.episode import run_episode
from areal_x.rollout.episodes import EpisodeEngine
from areal_x.types import Episode, Failed, Scored, Task, Trajectory
from tests import forking
from tests.conftest import environment_with
from tests.experiments import tiny_experiment
from tests.rollout.fakes import FakeEngine, Plain
from tests.thorough import thorough

TASK = Task("sum", "1+2=", "3")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)


class Replies:
    """A server that gives these (status, text) in turn, the last one for ever."""

    def __init__(self, *replies: tuple[int, str]) -> None:
        self.replies, self.seen, self.keys, self.together, self.most = list(replies), [], [], 0, 0
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.gate.set()
        replying = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "big-judge"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with replying.lock:
                    replying.together += 1
                    replying.most = max(replying.most, replying.together)
                    replying.seen.append(body)
                    replying.keys.append(self.headers.get("Authorization"))
                    status, text = replying.replies.pop(0) if len(replying.replies) > 1 else replying.replies[0]
                replying.gate.wait(20)
                with replying.lock:
                    replying.together -= 1
                made = {"choices": [{"message": {"content": text}}]} if status == 200 else {"error": {"message": text}}
                self.answer(status, made)

            def answer(self, status: int, made: Any) -> None:
                data = json.dumps(made).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Callable[..., Replies]]:
    made: list[Replies] = []

    def begin(*replies: tuple[int, str]) -> Replies:
        made.append(Replies(*replies))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def judged(workflow: LLMJudge, directory: Path, count: int = 1, seeds: bool = False) -> tuple[list[Episode], LLMJudge]:
    """Episodes at the same time, with the same seed unless `seeds`; and the workflow that ran them."""
    tokenizer = load_tokenizer(directory)
    engine = FakeEngine(context=4096)

    async def run() -> tuple[list[Episode], LLMJudge]:
        ready = workflow.setup(tokenizer)
        try:
            views = [EpisodeEngine(engine, (0, i if seeds else 0), lambda _: None, lambda _: None) for i in range(count)]
            return list(await asyncio.gather(*(run_episode(ready, TASK, view, 30.0) for view in views))), ready
        finally:
            await ready.close()

    return asyncio.run(run())


def judge_at(url: str, **settings: Any) -> LLMJudge:
    return LLMJudge(Plain(), url=url, **settings)


def test_the_verdict_is_the_reward_and_the_key_comes_from_the_environment(server, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    one = server((200, "It is right, if terse.\nScore: 1\nNo: Score: **7.5**"))
    (episode,), _ = judged(judge_at(one.url, key_variable="JUDGE_KEY"), tiny_model_dir)
    first = float(episode.trajectories[0].tokens[3])  # which the workflow itself rewards
    assert episode.outcome == Scored(0.75, {"verified": first, "judged": 0.75})
    assert [t.reward for t in episode.trajectories] == [0.75]
    (asked,) = one.seen
    assert (asked["model"], asked["temperature"], one.keys) == ("big-judge", 0.0, ["Bearer secret"])
    question = asked["messages"][0]["content"]
    said = load_tokenizer(tiny_model_dir).decode(episode.trajectories[0].tokens[3:].tolist(), skip_special_tokens=True)
    assert f"[Task]\n1+2=\n\n[Reference answer]\n3\n\n[Answer to grade]\n{said}\n" in question


def test_a_share_of_the_reward_stays_the_workflows_own(server, tiny_model_dir):
    one = server((200, "Score: 10"))
    (episode,), _ = judged(judge_at(one.url, share=0.25, model="m"), tiny_model_dir)
    assert episode.outcome.reward == 0.25 * 1 + 0.75 * episode.trajectories[0].tokens[3]


def test_what_may_pass_is_tried_again_and_what_will_not_is_the_episodes_failure(server, tiny_model_dir):
    one = server((500, "down"), (429, "slow down"), (200, "Score: 10"))
    (episode,), ready = judged(judge_at(one.url, model="m"), tiny_model_dir)
    assert episode.outcome.reward == 1.0
    assert ready.judge.requests == 3
    never = server((503, "starting"))
    (episode,), ready = judged(judge_at(never.url, model="m", attempts=2), tiny_model_dir)
    assert isinstance(episode.outcome, Failed)
    assert episode.outcome.error.endswith("gave no verdict in 2 attempts: it answered 503: starting")
    refused = server((400, "the prompt is too long"))
    (episode,), ready = judged(judge_at(refused.url, model="m"), tiny_model_dir)
    assert episode.outcome.error.endswith("refused the question (400): the prompt is too long")
    assert ready.judge.requests == 1


@pytest.mark.parametrize("reply", ["I like it.", "Score: 11", "Score: -1", ""])
def test_a_reply_without_a_score_is_no_reward_of_nought(reply, server, tiny_model_dir):
    one = server((200, reply))
    (episode,), ready = judged(judge_at(one.url, model="m"), tiny_model_dir)
    assert "no verdict in 1 attempt: its reply has no score from 0 to 10" in episode.outcome.error
    assert ready.judge.requests == 1  # at temperature 0 it would say the same
    (episode,), ready = judged(judge_at(one.url, model="m", temperature=1.0, attempts=3), tiny_model_dir)
    assert ready.judge.requests == 3


@pytest.mark.parametrize(
    "status, reason", [(401, r"refuses the key in \$OPENAI_API_KEY"), (404, "no model 'm'"), (302, "ends in /v1")]
)
def test_a_wrong_key_or_address_ends_the_run_with_what_to_change(status, reason, server, tiny_model_dir):
    one = server((status, "no"))
    with pytest.raises(UserError, match=reason):
        judged(judge_at(one.url, model="m"), tiny_model_dir)


def test_a_judge_that_is_not_there_or_says_nothing_fails_the_episode_in_time(server, tiny_model_dir):
    one = server((200, "Score: 1"))
    one.gate.clear()
    (episode,), _ = judged(judge_at(one.url, model="m", attempts=2, timeout_seconds=0.2), tiny_model_dir)
    assert "in 2 attempts" in episode.outcome.error
    assert "did not answer /chat/completions within 0.2 s" in episode.outcome.error
    (episode,), _ = judged(judge_at("http://127.0.0.1:9/v1", model="m", attempts=1), tiny_model_dir)
    assert "no judge's server answers at http://127.0.0.1:9/v1" in episode.outcome.error


def test_the_same_answer_is_judged_once_and_no_more_are_asked_about_than_allowed(server, tiny_model_dir):
    one = server((200, "Score: 4"))
    episodes, ready = judged(judge_at(one.url, model="m"), tiny_model_dir, count=5)
    assert [e.outcome.reward for e in episodes] == [0.4] * 5
    assert (len(one.seen), ready.judge.requests) == (1, 1)
    many = server((200, "Score: 4"))
    episodes, ready = judged(judge_at(many.url, model="m", concurrency=2), tiny_model_dir, count=9, seeds=True)
    assert len(many.seen) == len({e.trajectories[0].tokens.tobytes() for e in episodes}) > 4
    assert many.most <= 2


def test_an_answer_cannot_fill_other_places_of_the_rubric(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    trajectory = text_trajectory(tokenizer, [("1+2=", False), ("3", True), ("+1=", False), ("4", True)])
    task = Task("t", [{"role": "user", "content": "{answer}"}, {"role": "user", "content": "x"}], "{response}")
    rubric = "{prompt}|{answer}|{response}|{transcript}|{other}"
    assert question_of(rubric, task, trajectory, tokenizer) == "user: {answer}\n\nuser: x|{response}|4|1+2=3+1=4|{other}"


def text_trajectory(tokenizer: Any, texts: list[tuple[str, bool]]) -> Trajectory:
    parts = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text, _ in texts]
    mask = np.repeat([own for _, own in texts], [len(part) for part in parts])
    nothing = np.zeros(len(mask))
    return Trajectory(np.concatenate(parts), mask, nothing.astype(np.float32), nothing.astype(np.int32))


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"url": "judge:8000"}, r"llm_judge\.url .* ends in /v1, or 'engine'"),
        ({"pattern": "score"}, "with a group, the score"),
        ({"pattern": "("}, r"llm_judge\.pattern"),
        ({"rubric": "Is it good?"}, "{response}"),
        ({"rubric": "Is {prompt} answered by {answer}?"}, "{response}"),
        ({"highest": 0.0}, r"above llm_judge\.lowest = 0"),
        ({"share": 1.5}, r"llm_judge\.share"),
        ({"attempts": 0}, r"llm_judge\.attempts"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        judge_at(**{"url": "engine", **settings})


def test_the_runs_own_engine_judges_itself(tiny_model_dir, tmp_path):
    """A random model's replies rarely have a score: those that have none fail, and what is trained on has one."""
    inner = tiny_experiment(tiny_model_dir, tmp_path).workflow
    workflow = LLMJudge(inner, rubric="{response}=", pattern=r"(\d)", highest=9.0, max_tokens=12, temperature=1.0, attempts=8)
    run = tiny_experiment(tiny_model_dir, tmp_path, workflow=workflow, steps=2, row_length=64)
    for turn in run.turns(run.open()):
        for group in turn.groups:
            for episode in group.scored:
                assert episode.outcome.reward == episode.outcome.details["judged"]
                assert np.isclose(episode.outcome.reward * 9, round(episode.outcome.reward * 9))
                assert episode.outcome.details["verified"] >= 0


SERVED = """
model.path = '{model}'
import examples.arithmetic.task
train.dataset = @arithmetic.problems()
train.workflow = @single_turn()
single_turn.reward = @math_answer
sampling.max_tokens = 24
gateway.sampling = 'client'
train.row_length = 96
train.backend = 'torch'
embedded.slots = 4
"""


@thorough
def test_a_server_of_this_project_judges_as_the_official_client_hears_it(tiny_model_dir, tmp_path, monkeypatch):
    pytest.importorskip("areal_x_torch")
    from openai import OpenAI

    file, address = tmp_path / "serve.gin", tmp_path / "gateway.json"
    file.write_text(SERVED.format(model=tiny_model_dir))
    command = [sys.executable, "-m", "areal_x.serve", str(file), "--address", str(address)]
    with (tmp_path / "out").open("w") as out:
        serving = forking.popen(command, environment_with(1, PYTHONUNBUFFERED="1"), Path(__file__).parents[2], out, out)
    try:
        while not address.exists():
            assert serving.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        with session(address) as one:
            monkeypatch.setenv("PROJECT_KEY", one.key)
            settings = {"model": "policy", "rubric": "{prompt}{response}", "pattern": r"(\d)", "highest": 9.0, "attempts": 1}
            (episode,), _ = judged(judge_at(one.base_url, key_variable="PROJECT_KEY", **settings), tiny_model_dir)
            assert isinstance(episode.outcome, Scored), episode.outcome
            tokenizer = load_tokenizer(tiny_model_dir)
            said = tokenizer.decode(episode.trajectories[0].tokens[3:].tolist(), skip_special_tokens=True)
            with OpenAI(base_url=one.base_url, api_key=one.key) as client:
                asked = [{"role": "user", "content": f"1+2={said}"}]
                reply = client.chat.completions.create(model="policy", messages=asked, temperature=0, max_tokens=512)
            digits = [c for c in reply.choices[0].message.content or "" if c.isdigit()]
            assert episode.outcome.reward == pytest.approx(int(digits[-1]) / 9)
            one.reward(0.0)
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(timeout=60)
