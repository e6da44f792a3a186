"""Servers of the run on the nodes of a cluster: on each node of a server lives a keeper, which
starts the server's process there and ends it.

    driver                                             node
    supervisor ─▶ PlacedServer ──calls──────────────▶ Keeper ─▶ watchdogs ─▶ server
    dispatcher ────────────────────HTTP, with its key────────────────────────▶

A server's process that ends is started again by its keeper. A keeper that is gone, with or without
its node, is placed anew where there is room (Places); its watchdogs have ended the server.

A server on several nodes has a keeper on each. The process on the first node serves, the others
compute with it; if one of them ends or its keeper is gone, all are ended and started again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet import server_log
from areal_x.engines.fleet.failures import ServerLost
from areal_x.engines.fleet.folders import LOCK
from areal_x.engines.fleet.log_copy import LogCopy, LogPart, log_part
from areal_x.errors import UserError
from areal_x.runtime.shared_folder import marked
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
        """The node's address."""
        ...

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Makes the keeper run a method beside those that it is running. The future raises
        UserError if the method does, and ConnectionError as soon as the keeper is gone."""
        ...

    def end(self) -> None:
        """Kills the keeper. Safe to call twice."""
        ...


class Places(Protocol):
    """Room for servers in the cluster, by their numbers."""

    async def keepers(self, number: int) -> Sequence[RemoteKeeper]:
        """Returns the keepers of a server, one for each of its nodes; new ones if any is gone, once
        there is room for all.

        Raises: UserError if no node could ever have the room, or cannot be used; ConnectionError if
        one is gone at once.
        """
        ...

    def departing(self) -> set[int]:
        """Returns the servers on nodes that are being drained. May wait."""
        ...

    def vacate(self, number: int) -> None:
        """Ends the keepers of a server, and gives their room back. May wait."""
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

        Raises: UserError if this node does not see the folders that the driver shares, or lacks what
        the program needs.
        """
        self.stop()
        check_shared(launch)
        try:
            server = servers.start(launch, owns_staging=False)
        except UserError as error:
            raise UserError(f"the node {socket.gethostname()} cannot start it: {error}") from error
        self._server = server
        return Started(server.url, server.key, server.pid, server.log_start)

    def sees(self, file: Path) -> bool:
        """True if this node has a file."""
        return file.exists()

    def log_part(self, pid: int, offset: int) -> LogPart:
        """Returns what the server with this process id wrote to its log after the offset, once that
        is something (areal_x.engines.fleet.log_copy); nothing if another server was started."""
        server = self._server
        if server is None or server.pid != pid:
            return LogPart(b"", offset, is_last=True)
        return log_part(server.log, offset, lambda: server.poll() is not None)

    def free_port(self, address: str) -> int:
        """Returns a port that is free at this address of its node."""
        with servers.reserve(address, 0) as probe:
            return int(probe.getsockname()[1])

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
            f" {launch.kind.lower()}.staging to a folder that all nodes share under one path"
        )
    if not launch.model.is_dir():
        raise UserError(
            f"the node {here} does not see the model's directory {launch.model}: set model.path to a"
            " folder that all nodes share under one path"
        )


class PlacedServer:
    """A server that keepers started (areal_x.engines.fleet.server.StartedServer): on one node, or
    from the first on several. log: the first one's. copies: of the logs of nodes that do not share
    the run's directory, by the index of their keeper."""

    def __init__(
        self,
        keepers: Sequence[RemoteKeeper],
        started: Sequence[Started],
        log: Path,
        copies: Mapping[int, LogCopy] | None = None,
    ) -> None:
        first, self._copies = started[0], copies or {}
        self.url, self.key, self.pid, self.log = first.url, first.key, first.pid, log
        self._log_start = self._copies[0].start if 0 in self._copies else first.log_start
        self._keepers = keepers
        self._ended: list[Future[Ended]] = []  # in the order of their ends
        for keeper in keepers:
            keeper.call("wait").add_done_callback(self._ended.append)

    def poll(self) -> int | None:
        ended = self._end()
        return None if ended is None else ended.code

    def failure_reason(self) -> str:
        ended = self._end()
        return ended.reason if ended is not None else server_log.failure_in(self._read_log(None))

    def last_line(self) -> str:
        return server_log.last_line_in(self._read_log(server_log.LAST_BYTES))

    def release(self) -> None:
        for keeper in self._keepers:
            keeper.call("release")

    def terminate(self) -> None:
        for keeper in self._keepers:
            keeper.call("terminate")

    def stop(self) -> None:
        stopping = [(keeper, keeper.call("stop")) for keeper in self._keepers]
        until = time.monotonic() + SECONDS_TO_STOP
        for keeper, stopped in stopping:
            try:
                stopped.result(max(0.0, until - time.monotonic()))
            except Exception:  # it is gone or hangs: the watchdogs end the server after it
                keeper.end()
        for copy in self._copies.values():
            copy.ended.wait(max(0.0, until - time.monotonic()))

    def _end(self) -> Ended | None:
        """Returns how the first process ended that did, or why that is unknown; None while all
        run."""
        if not self._ended:
            return None
        try:
            return self._ended[0].result()
        except Exception as error:
            return Ended(KILLED, f"{error}")

    def _read_log(self, most: int | None) -> str:
        try:
            return server_log.read_log(self.log, self._log_start, most)
        except OSError:  # the node does not share the folder of the logs
            return f"its log is on the node {self._keepers[0].node}"


class ClusterStarter:
    """Starts servers in places of a cluster (areal_x.engines.fleet.server.Starter)."""

    keeps = False

    def __init__(self, places: Places) -> None:
        self._places = places

    async def start(self, number: int, launch: servers.Launch) -> servers.StartedServer:
        try:
            keepers = await self._places.keepers(number)
            launches = await launches_of(launch, keepers)
            seen = await see_logs(keepers, launch.log.parent)
            started = await start_parts(keepers, launches)
        except ConnectionError as error:
            raise ServerLost(f"{error}") from error
        copies = {
            index: LogCopy(
                partial(keepers[index].call, "log_part", part.pid),
                part.log_start,
                launches[index].log,
            )
            for index, part in enumerate(started)
            if not seen[index]
        }
        return PlacedServer(keepers, started, launch.log, copies)

    def departing(self) -> set[int]:
        return self._places.departing()

    def vacate(self, number: int) -> None:
        self._places.vacate(number)


async def see_logs(keepers: Sequence[RemoteKeeper], folder: Path) -> list[bool]:
    """Returns for each keeper whether its node shares the run's folder of logs."""
    with marked(folder) as mark:
        calls = [asyncio.wrap_future(keeper.call("sees", mark)) for keeper in keepers]
        with waiting(whose(), "its keeper to start the process", f"whether it shares {folder}"):
            return list(await asyncio.gather(*calls))


async def start_parts(
    keepers: Sequence[RemoteKeeper], launches: Sequence[servers.Launch]
) -> list[Started]:
    """Makes each keeper start its part of a server; if any cannot, the others end theirs."""
    calls = [keeper.call("start", launch) for keeper, launch in zip(keepers, launches, strict=True)]
    on = f"on {', '.join(keeper.node for keeper in keepers)}"
    with waiting(whose(), "its keeper to start the process", on):
        results = await asyncio.gather(*map(asyncio.wrap_future, calls), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        for keeper in keepers:
            keeper.call("stop")
        raise errors[0]
    return [result for result in results if isinstance(result, Started)]


async def launches_of(
    launch: servers.Launch, keepers: Sequence[RemoteKeeper]
) -> list[servers.Launch]:
    """Returns how each keeper starts its part of a server. launch: the whole server's."""
    first = keepers[0]
    if len(keepers) == 1:
        return [replace(launch, host=first.host)]
    with waiting(whose(), "its keeper to start the process", f"a free port on {first.node}"):
        asked = [first.call("free_port", first.node) for _ in range(2)]
        port, engines_port = await asyncio.gather(*map(asyncio.wrap_future, asked))
    return [
        replace(
            launch,
            host=keeper.host,
            log=launch.log if rank == 0 else launch.log.with_stem(f"{launch.log.stem}-host-{rank}"),
            part=servers.Part(len(keepers), rank, keeper.node, (first.node, port), engines_port),
        )
        for rank, keeper in enumerate(keepers)
    ]
