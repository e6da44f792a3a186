"""Servers of the run on the nodes of a cluster: on each server's node lives a keeper, which starts
the server's process and ends it.

    driver                                             node
    supervisor ─▶ PlacedServer ──calls──────────────▶ Keeper ─▶ watchdogs ─▶ vLLM
    dispatcher ────────────────────HTTP, with its key────────────────────────▶

A server's process that ends is started again by its keeper. A keeper that is gone, with or without
its node, is placed anew where there is room (Place); its watchdogs have ended the server.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm import server_log
from areal_x.engines.vllm.failures import ServerLost
from areal_x.engines.vllm.staging import LOCK
from areal_x.errors import UserError
from areal_x.runtime.waits import waiting, whose

SECONDS_TO_STOP = servers.STOP_SECONDS + 10.0  # for a keeper and its server
KILLED = 137


class RemoteKeeper(Protocol):
    """A keeper, seen from the driver. Its methods may be called from any thread."""

    @property
    def host(self) -> str:
        """The address that its servers listen on: loopback on the driver's own node."""
        ...

    @property
    def node(self) -> str:
        """The node's name, for messages."""
        ...

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Makes the keeper run a method beside those that it is running. The future raises
        UserError if the method does, and ConnectionError as soon as the keeper is gone."""
        ...

    def end(self) -> None:
        """Kills the keeper. Safe to call twice."""
        ...


class Place(Protocol):
    """Room for one server in the cluster."""

    async def keeper(self) -> RemoteKeeper:
        """Returns the keeper; a new one if the last is gone, once a node has room for it.

        Raises: UserError if no node could ever have the room, or cannot be used.
        """
        ...


@dataclass(frozen=True)
class Started:
    """What the driver must know of a server that its keeper started."""

    url: str
    key: str = field(repr=False)
    pid: int
    log_start: int


@dataclass(frozen=True)
class Ended:
    """How a server's process ended."""

    code: int
    reason: str


class Keeper:
    """Starts and ends the process of one server, on its node. Its methods may be called at the same
    time."""

    def __init__(self) -> None:
        self._server: servers.Server | None = None

    def start(self, launch: servers.Launch) -> Started:
        """Starts the server, after its last process has ended, and returns before it is ready.

        Raises: UserError if this node does not see the folders that the driver shares.
        """
        self.stop()
        check_shared(launch)
        server = servers.start(launch, owns_staging=False)
        self._server = server
        return Started(server.url, server.key, server.pid, server.log_start)

    def wait(self) -> Ended:
        """Returns when the process has ended."""
        assert self._server is not None
        server = self._server
        return Ended(server.process.wait(), server.failure_reason())

    def release(self) -> None:
        """Releases the server's port."""
        if self._server is not None:
            self._server.release()

    def terminate(self) -> None:
        """Tells the server to end."""
        if self._server is not None:
            self._server.terminate()

    def stop(self) -> None:
        """Ends the server; returns when all its processes are gone."""
        if self._server is not None:
            self._server.stop()


def check_shared(launch: servers.Launch) -> None:
    """Raises: UserError if this machine does not see the model or the staged weights under the
    driver's paths."""
    here = socket.gethostname()
    if not (launch.staging / LOCK).is_file():
        raise UserError(
            f"the node {here} does not see the staged weights in {launch.staging.parent}: set"
            " vllm.staging to a folder that all nodes share under one path"
        )
    if not launch.model.is_dir():
        raise UserError(
            f"the node {here} does not see the model's directory {launch.model}: set model.path to a"
            " folder that all nodes share under one path"
        )


class PlacedServer:
    """A server that a keeper started (areal_x.engines.vllm.server.StartedServer)."""

    def __init__(self, keeper: RemoteKeeper, started: Started, log: Path) -> None:
        self.url, self.key, self.pid, self.log = started.url, started.key, started.pid, log
        self._log_start = started.log_start
        self._keeper = keeper
        self._ended = keeper.call("wait")

    def poll(self) -> int | None:
        ended = self._end()
        return None if ended is None else ended.code

    def failure_reason(self) -> str:
        ended = self._end()
        return ended.reason if ended is not None else server_log.failure_in(self._read_log(None))

    def last_line(self) -> str:
        return server_log.last_line_in(self._read_log(server_log.LAST_BYTES))

    def release(self) -> None:
        self._keeper.call("release")

    def terminate(self) -> None:
        self._keeper.call("terminate")

    def stop(self) -> None:
        try:
            self._keeper.call("stop").result(SECONDS_TO_STOP)
        except Exception:  # it is gone or hangs: the watchdogs end the server after it
            self._keeper.end()

    def _end(self) -> Ended | None:
        """Returns how the process ended, or why that is unknown; None while it runs."""
        if not self._ended.done():
            return None
        try:
            ended: Ended = self._ended.result()
            return ended
        except Exception as error:
            return Ended(KILLED, f"{error}")

    def _read_log(self, most: int | None) -> str:
        try:
            return server_log.read_log(self.log, self._log_start, most)
        except OSError:  # the node does not share the folder of the logs
            return f"its log is on the node {self._keeper.node}"


def starter(places: Sequence[Place]) -> servers.Start:
    """Returns what starts each server in its place."""

    async def start(number: int, launch: servers.Launch) -> servers.StartedServer:
        try:
            keeper = await places[number].keeper()
            called = keeper.call("start", replace(launch, host=keeper.host))
            with waiting(whose(), "its keeper to start the process", f"on {keeper.node}"):
                started = await asyncio.wrap_future(called)
        except ConnectionError as error:
            raise ServerLost(f"{error}") from error
        return PlacedServer(keeper, started, launch.log)

    return start


# Names of the arguments by which a server computes on several accelerators.
WIDTHS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


def accelerators_of(arguments: Sequence[str]) -> int:
    """Returns the accelerators that a server with these arguments computes on: the product of its
    tensor, pipeline and data parallel sizes."""
    product = 1
    words = [part for word in arguments for part in word.split("=", 1)]
    for names in WIDTHS:
        for name, value in pairwise(words):
            if name.replace("_", "-") in names:
                with suppress(ValueError):  # vLLM refuses it
                    product *= int(value)
                    break
    return product
