"""Logs of servers on nodes that do not share the run's directory."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.fleet import log_copy
from areal_x.engines.fleet.folders import LOCK
from areal_x.engines.fleet.log_copy import LogCopy, LogPart, log_part
from areal_x.engines.fleet.placed import ClusterStarter
from areal_x.engines.fleet.server import StartedServer
from areal_x.engines.vllm.dialects import Dialect
from areal_x.engines.vllm.server import Launch
from areal_x.runtime import background
from tests.engines.fleet.keepers import LocalKeeper, keeping

STAND_IN = """
import pathlib, sys, time
print("first line", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
sys.exit("ValueError: the reason")
"""


class FarKeeper(LocalKeeper):
    """On a node that has another folder in the place of the run's. The last part of a log comes late."""

    def __init__(self, threads: ThreadPoolExecutor, host: str, own: Path) -> None:
        super().__init__(threads, host)
        self.own, self.stopped = own, threading.Event()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "start":
            (launch,) = arguments
            arguments = (replace(launch, log=self.own / launch.log.name),)
        elif method == "sees":
            arguments = (self.own / arguments[0].name,)
        elif method == "log_part" and not self.gone:
            return self.threads.submit(self.late, *arguments)
        called = super().call(method, *arguments)
        if method == "stop":
            called.add_done_callback(lambda _: self.stopped.set())
        return called

    def late(self, pid: int, offset: int) -> LogPart:
        part = self.keeper.log_part(pid, offset)
        if part.is_last:
            self.stopped.wait(60)
        return part


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    def command(launch: Launch, port: int, cpu: bool, dialect: Dialect) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(tmp_path / "end")]

    monkeypatch.setattr("areal_x.engines.vllm.server.command", command)
    for name in ("model", "staging", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "staging" / LOCK).touch()
    log = tmp_path / "logs" / "vllm-0.log"
    return Launch(tmp_path / "model", log, tmp_path / "staging", context=128, concurrency=8, seed=3)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarKeeper]:
    monkeypatch.setattr(log_copy, "COPY_SECONDS", 0.05)
    with keeping(FarKeeper, "127.0.0.2", tmp_path / "of the node") as made:
        yield made


async def start(launch: Launch, *all_keepers: LocalKeeper) -> StartedServer:
    async def keepers(number: int) -> list[LocalKeeper]:
        return list(all_keepers)

    places: Any = SimpleNamespace(keepers=keepers)
    return await ClusterStarter(places).start(1, launch)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def in_log(launch: Launch, text: str) -> Any:
    return lambda: launch.log.exists() and text in launch.log.read_text()


def test_a_log_is_copied_as_it_grows_and_to_its_end(launch: Launch, keeper: FarKeeper, tmp_path: Path) -> None:
    launch.log.write_text("of an earlier server\n")

    async def run() -> None:
        server = await start(launch, keeper)
        await until(in_log(launch, "first line"))
        assert server.poll() is None
        assert server.last_line() == "its log ends: first line"
        (tmp_path / "end").touch()
        await until(lambda: server.poll() is not None)
        await asyncio.to_thread(server.stop)
        assert server._copies[0].ended.is_set()  # type: ignore[attr-defined]
        assert launch.log.read_text() == "of an earlier server\nfirst line\nValueError: the reason\n"
        assert server.failure_reason() == "ValueError: the reason"
        # The same keeper starts it again, and its log follows.
        keeper.stopped.clear()
        again = await start(launch, keeper)
        assert keeper.keeper.log_part(server.pid, 7) == LogPart(b"", 7, True)  # nobody copies it twice
        await until(lambda: again.poll() is not None)
        await asyncio.to_thread(again.stop)
        assert again._read_log(None) == "first line\nValueError: the reason\n"  # type: ignore[attr-defined]

    asyncio.run(run())
    assert launch.log.read_text() == "of an earlier server\n" + 2 * "first line\nValueError: the reason\n"
    assert list(launch.log.parent.iterdir()) == [launch.log]


def test_a_log_is_copied_on_when_the_event_loop_has_ended(launch: Launch, keeper: FarKeeper, tmp_path: Path) -> None:
    """As of a server that the next attempt of the run keeps."""
    server = asyncio.run(start(launch, keeper))
    (tmp_path / "end").touch()
    server._keepers[0].call("wait").result(60)  # type: ignore[attr-defined]
    server.stop()
    assert server._copies[0].ended.is_set()  # type: ignore[attr-defined]
    assert launch.log.read_text() == "first line\nValueError: the reason\n"


def test_what_a_lost_node_wrote_is_there(launch: Launch, keeper: FarKeeper) -> None:
    async def run() -> None:
        server = await start(launch, keeper)
        await until(in_log(launch, "first line"))
        keeper.gone = True  # no answer follows
        keeper.keeper.terminate()
        await asyncio.to_thread(server.stop)

    asyncio.run(run())
    assert launch.log.read_text() == "first line\n"


def test_a_log_that_the_node_shares_is_not_copied(launch: Launch, keeper: FarKeeper, tmp_path: Path) -> None:
    """Of a server on two nodes, the second of which has other files."""
    near = LocalKeeper(keeper.threads, "127.0.0.3")

    async def run() -> None:
        server = await start(launch, near, keeper)
        await until(lambda: all("first line" in file.read_text() for file in launch.log.parent.iterdir()))
        (tmp_path / "end").touch()
        await until(lambda: server.poll() is not None)
        await asyncio.to_thread(server.stop)

    asyncio.run(run())
    text = "first line\nValueError: the reason\n"
    logs = {file.name: file.read_text() for file in launch.log.parent.iterdir()}
    assert logs == {"vllm-0.log": text, "vllm-0-host-1.log": text}
    near.keeper.stop()


def test_of_a_log_that_grows_too_fast_the_newest_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "COPY_BYTES", 10)
    log = tmp_path / "log"
    log.write_bytes(b"0123456789" * 3)
    assert log_part(log, 5, lambda: True) == LogPart(b"[15 bytes are left out]\n0123456789", 30, True)
    assert log_part(log, 25, lambda: True) == LogPart(b"56789", 30, True)


def test_a_disk_that_is_full_ends_the_copy_alone(tmp_path: Path) -> None:
    def ask(offset: int) -> Future[LogPart]:
        answer: Future[LogPart] = Future()
        answer.set_result(LogPart(b"text", 4, False))
        return answer

    failed: list[BaseException] = []

    async def run() -> None:
        background.watch(asyncio.get_running_loop(), failed.append)
        copy = LogCopy(ask, 0, Path("/dev/full"))
        await until(copy.ended.is_set)

    asyncio.run(run())
    assert failed == []
