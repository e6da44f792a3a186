"""Episodes that workers on other machines answer: each once, whatever becomes of the workers."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_x.agents.agent import Agent
from areal_x.agents.board import AgentFailed, Board, WorkerLost, result_of
from areal_x.agents.client import Session, SessionError
from areal_x.agents.gateway import Gateway
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.gateway.work import WorkAnswer, WorkOver
from areal_x.agents.remote_agent import RemoteAgent, task_json
from areal_x.agents.worker import FunctionAttempt, ProgramAttempt, Worker
from areal_x.errors import ConfigError, TaskError, UserError
from areal_x.rollout.episodes import TRAINING
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.types import Task
from tests.agents.certificates import certificate, needs_openssl, other_machine
from tests.agents.far_agents import SEEN
from tests.agents.test_agent import ask, run
from tests.conftest import environment_with
from tests.rewards.reward_functions import length
from tests.rollout.fakes import FakeEngine, until

ROOT = Path(__file__).parents[2]
TASKS = [Task(f"sum-{i}", f"{i}+1=", str(i + 1), {"wanted": str(i + 1), "hints": ("a", "b")}) for i in range(64)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


class Giving:
    """A runner over a fake engine whose episodes wait for workers."""

    def __init__(self, tokenizer, folder, groups=2, group_size=1, failed_groups=1, **settings):
        self.engine = FakeEngine(context=512)
        self.address = folder / "gateway.json"
        self.workflow = RemoteAgent(address_file=str(self.address), **settings).setup(tokenizer)
        self.runner = Runner(
            self.engine,
            self.workflow,
            TaskStream(TASKS, 0),
            TrajectoryQueue(groups, 0),
            group_size=group_size,
            episode_seconds=0.05,
            failed_groups=failed_groups,
        )

    async def __aenter__(self):
        self.engine.version = 1
        self.runner.begin(1)
        self.running = asyncio.create_task(self.runner.run())
        await until(self.address.exists)
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.workflow.close()

    @property
    def url(self):
        return json.loads(self.address.read_text())["url"]

    @property
    def key(self):
        return json.loads(self.address.read_text())["key"]

    def worker(self, attempt, **settings):
        settings = {"episodes": 4, "name": "a test's", "patience_seconds": 20.0, "message": lambda _: None, **settings}
        attempt = attempt if isinstance(attempt, ProgramAttempt) else FunctionAttempt(attempt)
        return Worker(self.url, self.key, attempt, **settings)

    @asynccontextmanager
    async def working(self, attempt, **settings):
        worker = self.worker(attempt, **settings)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            task.cancel()
            await asyncio.wait([task])

    def post(self, path, body=None):
        """Speaks to the gateway as a worker does, on a thread."""
        headers = {"authorization": f"Bearer {self.key}"}
        return asyncio.to_thread(lambda: httpx.post(f"{self.url}/{path}", json=body or {}, headers=headers, timeout=60).json())


def far(giving, agent, tmp_path, *more, inside=(), **variables):
    """Starts the command in a process of its own."""
    command = [sys.executable, "-m", "areal_x", "agents", "work", giving.url, "--agent", f"tests.agents.far_agents.{agent}"]
    environment = environment_with(1, PYTHONUNBUFFERED="1", **variables)
    with (tmp_path / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [*inside, *command, "--key-file", str(giving.address), *more], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


async def taken(giving):
    """Waits for a step as long as it takes, without blocking the loop."""
    return await asyncio.wait_for(giving.runner.take(), 60)


def adding(reward=1.0, calls=1):
    def solve(task, base_url, api_key):
        for _ in range(calls):
            ask(base_url, api_key, task.prompt)
        return reward

    return solve


# ---- the board


class OpenSession:
    """A session without a gateway."""

    def __init__(self, id="s"):
        self.id, self.key, self.closed = id, "key", 0

    def close(self):
        self.closed += 1


def board_test(work, **settings):
    async def main():
        await asyncio.wait_for(work(Board(**settings)), 30)

    asyncio.run(main())


async def offered(board, session=None):
    session = session or OpenSession()

    async def open_session():
        return session

    waiting = asyncio.create_task(board.lease_for(b"{}", open_session))
    await until(lambda: board._offers)
    return waiting, session


def test_an_episode_is_given_to_one_worker_and_the_next_waits_for_the_next():
    async def work(board):
        waiting, _ = await offered(board)
        first, second = await asyncio.gather(board.take("a", 10), board.take("b", 0.05))
        assert {first and first.lease, second and second.lease} == {"s", None}
        assert (await waiting).worker in ("a", "b")

    board_test(work)


def test_a_worker_that_waits_gets_what_is_offered_later_and_none_in_vain():
    async def work(board):
        early = [asyncio.create_task(board.take(name, 10)) for name in "abc"]
        await asyncio.sleep(0)
        leases = []
        for index in range(3):
            waiting, _ = await offered(board, OpenSession(f"s{index}"))
            leases.append(await waiting)
        assert sorted(one.lease for one in await asyncio.gather(*early)) == ["s0", "s1", "s2"]
        assert {lease.worker for lease in leases} == set("abc")

    board_test(work)


def test_the_first_answer_counts_and_no_later_one():
    async def work(board):
        waiting, session = await offered(board)
        await board.take("a", 10)
        lease = await waiting
        assert board.answer("s", WorkAnswer(result=1.0))
        assert not board.answer("s", WorkAnswer(result=2.0))
        assert not board.give_back("s")
        assert (await board.answer_to(session)).result == 1.0
        board.end(lease)
        assert not board.answer("s", WorkAnswer(result=3.0))
        assert session.closed == 1
        board.end(lease)  # twice does no harm

    board_test(work)


def test_a_silent_worker_is_lost_and_one_that_shows_signs_of_life_is_not():
    async def work(board):
        waiting, session = await offered(board)
        await board.take("a", 10)
        lease = await waiting
        begun = asyncio.get_running_loop().time()
        for _ in range(3):
            await asyncio.sleep(0.06)
            assert board.renew(["s", "other"]) == ["other"]
        with pytest.raises(WorkerLost, match="a has shown no sign of life") as lost:
            await board.answer_to(session)
        assert lost.value.died
        assert asyncio.get_running_loop().time() - begun >= 0.28
        board.end(lease)
        assert board.renew(["s"]) == ["s"]
        assert not board.answer("s", WorkAnswer(result=1.0))  # too late: another may have it

    board_test(work, lease_seconds=0.1)


def test_a_worker_that_disconnects_while_it_is_given_an_episode_leaves_it_for_the_next():
    async def work(board):
        gate = asyncio.Event()

        async def slow():
            await gate.wait()
            return OpenSession()

        waiting = asyncio.create_task(board.lease_for(b"{}", slow))
        gone = asyncio.create_task(board.take("gone", 10))
        await until(lambda: not board._offers and not gone.done() and waiting)
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait([gone])
        gate.set()
        assert (await board.take("next", 10)).lease == "s"
        assert (await waiting).worker == "next"

    board_test(work)


def test_an_episode_that_nobody_waits_for_any_more_is_given_to_nobody():
    async def work(board):
        waiting, session = await offered(board)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await board.take("a", 0) is None
        assert not board._offers
        waiting, session = await offered(board)
        await board.take("a", 10)
        waiting.cancel()  # in the moment in which it is taken
        await asyncio.wait([waiting])
        assert session.closed == 1
        assert board.renew(["s"]) == ["s"]

    board_test(work)


def test_the_end_of_the_run_reaches_workers_that_wait():
    async def work(board):
        polling = asyncio.create_task(board.take("a", 60))
        await asyncio.sleep(0)
        board.close()
        for poll in (polling, board.take("b", 60)):
            with pytest.raises(WorkOver):
                await poll

    board_test(work)


@pytest.mark.parametrize("task", [Task("t", "1+1=", {1, 2}), Task("t", "1+1=", None, {"image": object()})])
def test_a_task_that_json_cannot_hold_fails_alone_with_the_reason(task):
    with pytest.raises(TaskError, match="task t cannot be sent to a worker"):
        task_json(task, True)


def test_answers_stay_in_the_run_if_it_is_told_so():
    assert json.loads(task_json(TASKS[0], True))["answer"] == "1"
    assert json.loads(task_json(TASKS[0], False))["answer"] is None
    assert json.loads(task_json(Task("t", "1+1=", {1, 2}), False))["answer"] is None


def test_what_a_program_printed_counts_unless_its_session_was_given_rewards():
    def session(**rewards):
        return SimpleNamespace(state=SimpleNamespace(rewards=rewards))

    assert result_of(WorkAnswer(printed="42"), session()) == "42"
    assert result_of(WorkAnswer(printed="42"), session(call=1.0)) is None
    assert result_of(WorkAnswer(result="42"), session(call=1.0)) == "42"
    with pytest.raises(AgentFailed, match="no page"):
        result_of(WorkAnswer(error="no page"), session())


@pytest.mark.parametrize("settings", [{"lease_seconds": 0.0}, {"attempts": 0}])
def test_settings_that_could_give_nobody_an_episode_are_refused(settings):
    with pytest.raises(ConfigError):
        RemoteAgent(**settings)


# ---- workers in this process


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


# ---- what becomes of them


def test_an_episode_of_a_worker_that_goes_is_given_to_the_next_at_once_in_another_session(tokenizer, tmp_path):
    """A worker that ends in an orderly way gives its episodes back: nobody waits for its silence."""
    bases = []

    async def hanging(task, base_url, api_key):
        bases.append((task.id, base_url))
        await asyncio.to_thread(ask, base_url, api_key, task.prompt)
        await asyncio.sleep(3600)

    def solve(task, base_url, api_key):
        bases.append((task.id, base_url))
        return adding(0.5)(task, base_url, api_key)

    async def main():
        async with Giving(tokenizer, tmp_path, groups=1, lease_seconds=3600.0) as giving:
            async with giving.working(hanging, episodes=1):
                await until_soon(lambda: giving.engine.requests)
            async with giving.working(solve, episodes=1):
                (group,) = await taken(giving)
        assert group.rewards == [0.5]
        assert [task for task, _ in bases[:2]] == [group.task.id] * 2
        assert bases[0][1] != bases[1][1]
        (episode,) = group.episodes
        assert sum(int(t.mask.sum()) for t in episode.trajectories) == 5  # one call's: the lost one's are not trained on
        assert giving.runner.stats().failed == 0

    asyncio.run(main())


def test_an_episode_that_kills_its_workers_fails_at_last(tokenizer, tmp_path, caplog):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1, lease_seconds=1.0, attempts=2, failed_groups=100) as giving:
            for name in ("first", "second"):
                told = await giving.post("work", {"worker": name, "wait_seconds": 10})
                giving.workflow.board._leases[told["lease"]].until = 0.0  # it has been silent for a second
            await until_soon(lambda: giving.runner.stats().failed == 1)
            assert list(giving.runner.stats().errors) == ["2 workers died at it, one after another (remote_agent.attempts)"]

    asyncio.run(main())
    assert [r.message.partition(": ")[2] for r in caplog.records if "starts anew" in r.message] == [
        "the worker first has shown no sign of life for 1 s",
        "the worker second has shown no sign of life for 1 s",
    ]


def test_what_a_worker_sends_after_it_was_given_up_changes_nothing(tokenizer, tmp_path):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1, lease_seconds=1.0) as giving:
            lost = await giving.post("work")
            session = Session(f"{giving.url}/sessions/{lost['lease']}", lost["key"])
            await asyncio.to_thread(ask, session.base_url, session.key)
            giving.workflow.board._leases[lost["lease"]].until = 0.0
            async with giving.working(adding(0.5)):
                (group,) = await taken(giving)
                assert await giving.post(f"work/{lost['lease']}/answer", {"result": 7.0}) == {"counts": False}
                assert await giving.post(f"work/{lost['lease']}/return") == {"counts": False}
                assert await giving.post("work/alive", {"leases": [lost["lease"]]}) == {"lost": [lost["lease"]]}
                with pytest.raises(SessionError, match="over"):
                    await asyncio.to_thread(session.reward, 1.0)
        assert group.rewards == [0.5]

    asyncio.run(main())


def test_a_worker_that_was_given_up_ends_its_agent(tokenizer, tmp_path):
    ended = []

    async def hanging(task, base_url, api_key):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(task.id)

    async def main():
        giving = Giving(tokenizer, tmp_path, groups=1, lease_seconds=1.0)
        async with giving, giving.working(hanging, episodes=1):
            await until_soon(lambda: giving.workflow.board._leases)
            (lease,) = giving.workflow.board._leases
            giving.workflow.board.give_back(lease)  # as if the run had given it up
            await until_soon(lambda: ended)

    asyncio.run(main())


def test_a_worker_whose_run_is_gone_ends_its_agents_and_waits_for_another_run(tokenizer, tmp_path):
    """A run that was killed may be resumed at the same address: the worker goes on there."""
    ended = []

    async def solve(task, base_url, api_key):
        if ended:
            await asyncio.to_thread(ask, base_url, api_key, task.prompt)
            return 0.5
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(task.id)

    async def main():
        giving = Giving(tokenizer, tmp_path, groups=1, lease_seconds=1.0)
        async with giving:
            worker = giving.worker(solve, episodes=1)
            working = asyncio.create_task(worker.run())
            await until_soon(lambda: giving.workflow.board._leases)
            giving.workflow.board.close = lambda: None  # it is killed: it tells nobody
        await until_soon(lambda: ended)
        giving.address.unlink()
        again = Gateway(port=giving.workflow.gateway.port)
        again.key = giving.workflow.gateway.key
        async with Giving(tokenizer, tmp_path, groups=1, lease_seconds=2.0, gateway=again) as giving:
            (group,) = await taken(giving)
            assert group.rewards == [0.5]
        await asyncio.wait_for(working, 20)

    asyncio.run(main())


def test_a_session_has_its_limits_at_a_worker_as_well(tokenizer, tmp_path):
    async def hanging(task, base_url, api_key):
        await asyncio.sleep(3600)

    async def main():
        limits = SessionLimits(idle_seconds=0.1)
        async with Giving(tokenizer, tmp_path, groups=1, limits=limits) as giving, giving.working(hanging):
            await until_soon(lambda: giving.runner.stats().timed_out)

    asyncio.run(main())


def test_the_end_of_the_run_ends_its_workers(tokenizer, tmp_path):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1) as giving:
            worker = asyncio.create_task(giving.worker(adding()).run())
            await taken(giving)
        await asyncio.wait_for(worker, 20)

    asyncio.run(main())


def test_a_run_that_refuses_a_worker_or_does_not_answer_ends_it_with_the_reason(tokenizer, tmp_path):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1) as giving:
            stranger = giving.worker(adding())
            stranger.key = "wrong"
            with pytest.raises(UserError, match="taking episodes needs the gateway's key"):
                await stranger.run()
            assert "wrong" not in repr(stranger)
            late = giving.worker(adding(), patience_seconds=0.0)
        with pytest.raises(UserError, match="no run has answered"):
            await late.run()

    asyncio.run(main())


def test_a_run_without_episodes_for_workers_says_so():
    async def main():
        gateway = Gateway()
        await gateway.start()
        worker = Worker(gateway.url, gateway.key, FunctionAttempt(adding()))
        with pytest.raises(UserError, match="@remote_agent"):
            await worker.run()
        await gateway.close()

    asyncio.run(main())


def test_a_key_does_not_follow_a_redirection():
    """Whoever answers in place of the gateway could have it sent anywhere."""
    seen = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.path)
            self.send_response(302)
            self.send_header("location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        worker = Worker(f"http://127.0.0.1:{server.server_port}", "secret", FunctionAttempt(adding()))
        with pytest.raises(UserError, match="refuses"):
            asyncio.run(worker.run())
        server.shutdown()
        thread.join()
    assert seen == ["/work"]


@needs_openssl
def test_a_worker_that_does_not_trust_the_certificate_sends_nothing_and_says_so(tokenizer, tmp_path):
    files = certificate(tmp_path)

    async def main():
        gateway = Gateway(certificate=files.file, certificate_key=files.key)
        async with Giving(tokenizer, tmp_path, groups=1, gateway=gateway) as giving:
            with pytest.raises(UserError, match="no secure connection to https://127"):
                await giving.worker(adding()).run()

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


# ---- workers of their own processes, on a machine of their own


def test_a_worker_that_is_killed_in_the_middle_of_an_episode_loses_nothing(tokenizer, tmp_path):
    async def main():
        async with Giving(tokenizer, tmp_path, groups=1, lease_seconds=1.0) as giving:
            first = far(giving, "hanging", tmp_path, "--name", "first", **{SEEN: str(tmp_path)})
            try:
                await until_soon(lambda: list(tmp_path.glob("sum-*")))
            finally:
                first.send_signal(signal.SIGKILL)
                first.wait()
            async with giving.working(adding(0.5), episodes=1):
                (group,) = await taken(giving)
            assert group.rewards == [0.5]
            assert (tmp_path / group.task.id).exists()  # the first worker had begun it
            assert sum(int(t.mask.sum()) for t in group.episodes[0].trajectories) == 5
            assert giving.runner.stats().failed == 0

    asyncio.run(main())


@needs_openssl
def test_an_agent_on_another_machine_trains_through_tls(tokenizer, tmp_path):
    """And gets nowhere without the key, unencrypted, or from an address outside the networks."""

    async def main(machine):
        files = certificate(tmp_path, machine.here)
        gateway = Gateway(
            host=machine.here,
            certificate=files.file,
            certificate_key=files.key,
            networks=(f"{machine.addresses[0]}/32",),
        )
        async with Giving(tokenizer, tmp_path, groups=2, gateway=gateway) as giving:
            assert giving.url == f"https://{machine.here}:{gateway.port}"
            inside = machine.inside()
            worker = far(giving, "asking", tmp_path, "--certificate", files.file, inside=inside)
            try:
                groups = await taken(giving)
            finally:
                worker.terminate()
                worker.wait(20)
            assert [group.rewards for group in groups] == [[1.0], [1.0]]
            curl = [sys.executable, "-c", CALL, str(gateway.port), machine.here, files.file, giving.key, *machine.addresses]
            found = await asyncio.create_subprocess_exec(*machine.inside(*curl), stdout=subprocess.PIPE)
            said = json.loads((await found.communicate())[0])
            assert said == {"key": 200, "no key": 401, "wrong key": 401, "plain": None, "outside": None, "untrusted": None}

    with other_machine() as machine:
        asyncio.run(main(machine))


CALL = """
import http.client, json, ssl, sys
port, host, file, key, own, other = sys.argv[1:]
trusting = ssl.create_default_context(cafile=file)
def status(key="", plain=False, source=own, context=trusting):
    kind = http.client.HTTPConnection if plain else http.client.HTTPSConnection
    more = {} if plain else {"context": context}
    call = kind(host, int(port), timeout=20, source_address=(source, 0), **more)
    try:
        call.request("POST", "/work", b'{"wait_seconds": 0}', {"authorization": f"Bearer {key}"})
        return call.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
print(json.dumps({
    "key": status(key), "no key": status(), "wrong key": status(key[:-1]), "plain": status(key, plain=True),
    "outside": status(key, source=other), "untrusted": status(key, context=ssl.create_default_context()),
}))
"""


async def until_soon(condition):
    """As `until`, for what threads and other processes do: it leaves them the processor."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
