"""Servers that keepers start, here with keepers in this process in place of a cluster's."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.failures import ServerLost
from areal_x.engines.vllm.fleet import State
from areal_x.engines.vllm.placed import Keeper, PlacedServer, Started, accelerators_of, starter
from areal_x.engines.vllm.server import Launch
from areal_x.engines.vllm.staging import LOCK
from areal_x.engines.vllm.supervisor import Supervisor
from areal_x.engines.vllm.transports import check_run
from areal_x.errors import ConfigError, UserError

HOST = "127.0.0.2"  # in place of another node's address
STAND_IN = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
print("ValueError: the reason", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Healthy).serve_forever()
"""


class LocalKeeper:
    """A keeper in this process. gone: it does not answer any more."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.host, self.node = HOST, "node-7"
        self.keeper, self.threads, self.ends = Keeper(), threads, 0
        self.calls: list[Future[Any]] = []
        self.gone = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if self.gone:
            called: Future[Any] = Future()
            called.set_exception(ConnectionError("its keeper on node-7 is gone: the node died"))
            return called
        return self.threads.submit(getattr(self.keeper, method), *arguments)

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    with ThreadPoolExecutor(8) as threads:
        keeper = LocalKeeper(threads)
        yield keeper
        keeper.keeper.stop()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    def command(launch: Launch, port: int, cpu: bool) -> list[str]:
        return [sys.executable, "-c", STAND_IN, launch.host, str(port)]

    monkeypatch.setattr(servers, "command", command)
    for name in ("model", "staging"):
        (tmp_path / name).mkdir()
    (tmp_path / "staging" / LOCK).touch()
    log = tmp_path / "logs" / "vllm-0.log"
    return Launch(tmp_path / "model", log, tmp_path / "staging", context=128, concurrency=8, seed=3)


async def start(keeper: LocalKeeper, launch: Launch) -> servers.StartedServer:
    async def place() -> LocalKeeper:
        return keeper

    nowhere: Any = None
    return await starter([nowhere, SimpleNamespace(keeper=place)])(1, launch)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_is_started_by_its_keeper_and_answers_at_its_nodes_address(keeper: LocalKeeper, launch: Launch) -> None:
    async def started() -> servers.StartedServer:
        server = await start(keeper, launch)
        await servers.wait_until_ready(server, "the server", 60, lambda line: None)
        return server

    server = asyncio.run(started())
    assert server.url.startswith(f"http://{HOST}:")
    assert server.poll() is None
    assert server.last_line() == "its log ends: ValueError: the reason"
    wait_for(lambda: keeper.keeper._server.reserved.fileno() == -1)  # let go of
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, int(server.url.rpartition(":")[2])))


def test_a_server_that_dies_gives_its_last_words_and_is_started_again_by_the_same_keeper(
    keeper: LocalKeeper, launch: Launch
) -> None:
    server = asyncio.run(start(keeper, launch))
    wait_for(lambda: "reason" in server.last_line())
    server.terminate()
    wait_for(lambda: server.poll() is not None)
    assert server.failure_reason() == "ValueError: the reason"
    again = asyncio.run(start(keeper, replace(launch, seed=4)))
    assert again.pid != server.pid
    assert again.poll() is None
    again.stop()


def test_a_keeper_that_is_gone_is_the_end_of_its_server(keeper: LocalKeeper, launch: Launch) -> None:
    keeper.gone = True
    server = PlacedServer(keeper, Started(f"http://{HOST}:1", "key", 7, 0), launch.log)
    assert server.poll() == 137
    assert server.failure_reason() == "its keeper on node-7 is gone: the node died"
    server.release()
    server.terminate()
    server.stop()
    assert keeper.ends == 1
    with pytest.raises(ServerLost, match="its keeper on node-7 is gone"):
        asyncio.run(start(keeper, launch))


def test_a_keeper_that_does_not_answer_is_killed(keeper: LocalKeeper, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_x.engines.vllm.placed.SECONDS_TO_STOP", 0.05)
    keeper.call = lambda *_: Future()  # type: ignore[method-assign]
    PlacedServer(keeper, Started(f"http://{HOST}:1", "key", 7, 0), launch.log).stop()
    assert keeper.ends == 1


def test_of_a_log_that_only_its_node_sees_the_place_is_told(keeper: LocalKeeper, launch: Launch) -> None:
    keeper.call = lambda *_: Future()  # type: ignore[method-assign]
    server = PlacedServer(keeper, Started(f"http://{HOST}:1", "key", 7, 0), launch.log / "not here")
    assert server.last_line() == "its log ends: its log is on the node node-7"
    assert server.failure_reason() == "its log is on the node node-7"


def test_a_node_that_does_not_see_the_staged_weights_is_refused_before_anything_starts(
    keeper: LocalKeeper, launch: Launch
) -> None:
    (launch.staging / LOCK).unlink()
    sentence = r"^the node \S+ does not see the staged weights in .*: set vllm\.staging to a folder that all nodes share"
    with pytest.raises(UserError, match=sentence):
        asyncio.run(start(keeper, launch))
    assert not launch.log.exists()


def test_a_node_that_does_not_see_the_model_is_refused(keeper: LocalKeeper, launch: Launch) -> None:
    launch.model.rmdir()
    with pytest.raises(UserError, match=r"does not see the model's directory .*: set model\.path"):
        asyncio.run(start(keeper, launch))


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 1),
        (("--tensor-parallel-size", "8"), 8),
        (("--tensor-parallel-size=4", "-pp", "2"), 8),
        (("--tensor_parallel_size=4", "--seed", "-dp", "-dp", "2"), 8),
        (("-tp",), 1),
        (("-tp", "many"), 1),
    ],
)
def test_a_server_needs_as_many_accelerators_as_its_parallel_sizes_say(arguments: tuple[str, ...], count: int) -> None:
    assert accelerators_of(arguments) == count


def test_devices_are_refused_where_ray_gives_them() -> None:
    config = VLLMConfig(devices=("0",))
    check_run(config, "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.devices .* Ray gives each server its accelerators"):
        check_run(config, "torch", here=False, lora_rank=0)


@pytest.mark.loses(r"a is lost \(it died\)")
def test_a_process_that_ended_is_noticed_long_before_the_next_heartbeat() -> None:
    async def nothing(*_: Any) -> Any: ...

    class Replica:
        name, ours, death = "a", True, None

        def cause_of_death(self) -> str | None:
            return self.death

        async def is_healthy(self, seconds: float) -> bool:
            self.beaten.set()
            return True

        def __init__(self) -> None:
            self.client, self.beaten = self, asyncio.Event()

    async def noticed() -> None:
        supervisor = Supervisor(VLLMConfig(heartbeat_seconds=1000.0), print, nothing, nothing, nothing, lambda: None)
        replica: Any = Replica()
        supervisor.add(replica)
        supervisor.fleet.due(time.monotonic())
        supervisor.fleet.reached("a")
        assert supervisor.fleet.accepted("a", 0, time.monotonic())
        supervisor.watch()
        await replica.beaten.wait()
        await asyncio.sleep(0)  # the watch waits for the next heartbeat
        replica.death = "it died"
        while supervisor.fleet.members["a"].state is not State.DOWN:
            await asyncio.sleep(0.02)
        await supervisor.close()

    asyncio.run(asyncio.wait_for(noticed(), 30))


def test_the_drivers_variables_for_vllm_are_passed_on_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_x.cluster.surroundings import surroundings

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    found = surroundings(None, ["VLLM_"]).environment
    assert found["VLLM_LOGGING_LEVEL"] == os.environ["VLLM_LOGGING_LEVEL"]
    assert "VLLM_API_KEY" not in found
