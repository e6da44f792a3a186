"""Servers that keepers start, here with keepers in this process in place of a cluster's."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.failures import ServerLost
from areal_x.engines.fleet.fleet import State
from areal_x.engines.fleet.folders import LOCK
from areal_x.engines.fleet.placed import ClusterStarter, PlacedServer, Started
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dialects import Dialect
from areal_x.engines.vllm.server import Launch
from areal_x.engines.vllm.transports import check_run
from areal_x.errors import ConfigError, UserError
from areal_x.shards.starter import SERVERS_READ
from tests.engines.fleet.keepers import LocalKeeper, keeping

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


@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    with keeping(LocalKeeper, HOST) as keeper:
        yield keeper


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    def command(launch: Launch, port: int, cpu: bool, dialect: Dialect) -> list[str]:
        return [sys.executable, "-c", STAND_IN, launch.host, str(port)]

    monkeypatch.setattr("areal_x.engines.vllm.server.command", command)
    for name in ("model", "staging"):
        (tmp_path / name).mkdir()
    (tmp_path / "staging" / LOCK).touch()
    log = tmp_path / "logs" / "vllm-0.log"
    return Launch(tmp_path / "model", log, tmp_path / "staging", context=128, concurrency=8, seed=3)


async def start(keeper: LocalKeeper, launch: Launch, *others: LocalKeeper) -> servers.StartedServer:
    async def keepers(number: int) -> list[LocalKeeper]:
        assert number == 1
        return [keeper, *others]

    places: Any = SimpleNamespace(keepers=keepers)
    return await ClusterStarter(places).start(1, launch)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_is_started_by_its_keeper_and_answers_at_its_nodes_address(keeper: LocalKeeper, launch: Launch) -> None:
    async def started() -> servers.StartedServer:
        server = await start(keeper, launch)
        await servers.wait_until_ready(server, launch, "the server", 60, lambda line: None)
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
    server = PlacedServer([keeper], [Started(f"http://{HOST}:1", "key", 7, 0)], launch.log)
    assert server.poll() == 137
    assert server.failure_reason() == "its keeper on 127.0.0.2 is gone: the node died"
    server.release()
    server.terminate()
    server.stop()
    assert keeper.ends == 1
    with pytest.raises(ServerLost, match=r"its keeper on 127\.0\.0\.2 is gone"):
        asyncio.run(start(keeper, launch))


def test_a_keeper_that_does_not_answer_is_killed(keeper: LocalKeeper, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_x.engines.fleet.placed.SECONDS_TO_STOP", 0.05)
    keeper.call = lambda *_: Future()  # type: ignore[method-assign]
    PlacedServer([keeper], [Started(f"http://{HOST}:1", "key", 7, 0)], launch.log).stop()
    assert keeper.ends == 1


def test_of_a_log_that_only_its_node_sees_the_place_is_told(keeper: LocalKeeper, launch: Launch) -> None:
    keeper.call = lambda *_: Future()  # type: ignore[method-assign]
    server = PlacedServer([keeper], [Started(f"http://{HOST}:1", "key", 7, 0)], launch.log / "not here")
    assert server.last_line() == "its log ends: its log is on the node 127.0.0.2"
    assert server.failure_reason() == "its log is on the node 127.0.0.2"


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


def test_devices_are_refused_where_ray_gives_them() -> None:
    config = VLLMConfig(devices=("0",))
    check_run(config, "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.devices .* Ray gives each server its accelerators"):
        check_run(config, "torch", here=False, lora_rank=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"most": 3}, r"vllm\.most = 3 .* with train\.cluster = 'here', where no machine joins"),
        ({"hosts": 2}, r"vllm\.hosts = 2 .* 1 with train\.cluster = 'here'"),
    ],
)
def test_one_machine_has_a_fixed_number_of_servers_and_each_is_on_it(settings: dict[str, Any], words: str) -> None:
    config = VLLMConfig(tensor=2, **settings)
    check_run(config, "torch", here=False, lora_rank=0)
    with pytest.raises(ConfigError, match=words):
        check_run(config, "torch", here=True, lora_rank=0)


def test_each_host_of_a_server_has_an_equal_part_of_it() -> None:
    check_run(VLLMConfig(hosts=2, tensor=2, pipeline=3), "torch", here=False, lora_rank=0)
    for tensor in (1, 3):
        with pytest.raises(ConfigError, match=r"vllm\.hosts = 2 .* a divisor of [13], the accelerators of a server \(vllm"):
            check_run(VLLMConfig(hosts=2, tensor=tensor), "torch", here=False, lora_rank=0)


@pytest.fixture
def other(keeper: LocalKeeper) -> Iterator[LocalKeeper]:
    """The keeper of a second host."""
    made = LocalKeeper(keeper.threads, "127.0.0.3")
    yield made
    made.keeper.stop()


def parts(*keepers: LocalKeeper) -> list[servers.Server]:
    return [keeper.keeper._server for keeper in keepers]  # type: ignore[misc]


def test_a_server_on_two_hosts_is_started_on_both_and_meets_at_the_first(
    keeper: LocalKeeper, other: LocalKeeper, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Launch] = []
    begin = servers.start

    def start_part(launch: Launch, **how: Any) -> servers.Server:
        begun.append(launch)
        return begin(launch, **how)

    monkeypatch.setattr(servers, "start", start_part)
    server = asyncio.run(start(keeper, launch, other))
    begun.sort(key=lambda launch: launch.part.rank)  # type: ignore[union-attr]
    assert [begun[0].log, begun[1].log] == [launch.log, launch.log.with_name("vllm-0-host-1.log")]
    assert [(part.host, part.part.hosts, part.part.address) for part in begun if part.part] == [
        ("127.0.0.2", 2, "127.0.0.2"),
        ("127.0.0.3", 2, "127.0.0.3"),
    ]
    assert begun[0].part.meeting_place == begun[1].part.meeting_place  # type: ignore[union-attr]
    assert begun[0].part.meeting_place[0] == "127.0.0.2"  # type: ignore[union-attr]
    assert server.url == parts(keeper)[0].url
    assert server.poll() is None
    server.stop()
    assert None not in [part.poll() for part in parts(keeper, other)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_is_lost_with_any_of_its_parts_and_its_keepers_start_all_again(
    rank: int, keeper: LocalKeeper, other: LocalKeeper, launch: Launch
) -> None:
    server = asyncio.run(start(keeper, launch, other))
    before = parts(keeper, other)
    wait_for(lambda: all("reason" in part.last_line() for part in before))
    assert server.poll() is None
    before[rank].terminate()
    wait_for(lambda: server.poll() is not None)
    assert server.failure_reason() == "ValueError: the reason"
    assert before[1 - rank].poll() is None
    server.stop()
    assert None not in [part.poll() for part in before]
    again = asyncio.run(start(keeper, launch, other))
    assert again.poll() is None
    assert not {part.pid for part in before} & {part.pid for part in parts(keeper, other)}
    again.stop()


def test_a_server_is_lost_with_any_of_its_keepers(keeper: LocalKeeper, other: LocalKeeper, launch: Launch) -> None:
    other.gone = True
    started = keeper.keeper.start(replace(launch, host=HOST))
    server = PlacedServer([keeper, other], [started, started], launch.log)
    assert server.poll() == 137
    assert server.failure_reason() == "its keeper on 127.0.0.3 is gone: the node died"
    with pytest.raises(ServerLost, match=r"its keeper on 127\.0\.0\.3 is gone"):
        asyncio.run(start(keeper, launch, other))


def test_a_part_that_cannot_start_ends_the_others(keeper: LocalKeeper, other: LocalKeeper, launch: Launch) -> None:
    began = other.keeper.start

    def refused(launch: Launch) -> Started:
        wait_for(lambda: keeper.keeper._server is not None)
        raise UserError("the node does not see the model")

    other.keeper.start = refused  # type: ignore[method-assign]
    with pytest.raises(UserError, match="does not see"):
        asyncio.run(start(keeper, launch, other))
    wait_for(lambda: parts(keeper)[0].poll() is not None)
    other.keeper.start = began  # type: ignore[method-assign]


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


def test_the_drivers_variables_for_servers_are_passed_on_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_x.cluster.surroundings import surroundings

    settings = {"VLLM_LOGGING_LEVEL": "DEBUG", "SGLANG_LOG_LEVEL": "debug"}
    keys = {"VLLM_API_KEY": "secret", "SGLANG_API_KEY": "secret", "SGLANG_ADMIN_API_KEY": "secret"}
    for name, value in (settings | keys).items():
        monkeypatch.setenv(name, value)
    found = surroundings(None, SERVERS_READ).environment
    assert found.items() >= settings.items()
    assert not keys.keys() & found.keys()
