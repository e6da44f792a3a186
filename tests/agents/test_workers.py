"""What becomes of workers and their episodes: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from transformers import AutoTokenizer

from areal_x.agents.client import Session, SessionError
from areal_x.agents.gateway import Gateway
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.worker import FunctionAttempt, Worker
from areal_x.errors import UserError
from tests.agents.certificates import certificate, needs_openssl, other_machine
from tests.agents.far_agents import SEEN
from tests.agents.giving import Giving, adding, far, taken, until_soon
from tests.agents.test_agent import ask


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


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
