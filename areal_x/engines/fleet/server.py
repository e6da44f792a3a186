"""Starts and stops server processes on this machine.

areal_x.engines.fleet.placed does so on other nodes of a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from areal_x.engines.fleet import watchdog
from areal_x.engines.fleet.addresses import LOOPBACK, url_of
from areal_x.engines.fleet.client import Client
from areal_x.engines.fleet.connections import OutOfFiles
from areal_x.engines.fleet.server_log import LAST_BYTES, failure_in, last_line_in, read_log
from areal_x.engines.fleet.widths import Widths
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.runtime import guard
from areal_x.runtime.waits import waiting

POLL_SECONDS = 0.1
REPORT_SECONDS = 5.0
STOP_SECONDS = watchdog.GRACE_SECONDS + 5.0
# environment variables that list a process's visible GPUs or NPUs
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """The processes of one server on one of its hosts. The first part serves, and all compute."""

    hosts: int
    """Number of the server's hosts."""
    rank: int
    """This host's number, from 0."""
    address: str
    """This host's address, for the server's own connections."""
    meeting_place: tuple[str, int]
    """The first host's address, and a port that is free there."""
    engines_port: int = 0
    """Another one, at which data-parallel engines report to the first host."""


@dataclass(frozen=True)
class Launch(ABC):
    """How to start one server: what all have in common, and what the dialect of a program makes of
    it."""

    kind: ClassVar[str]
    """The program's name, as messages have it."""

    model: Path
    log: Path
    staging: Path
    """Folder of staged weights."""
    context: int
    concurrency: int
    seed: int
    """Of the server's random numbers; servers of one run need different seeds, or they sample the
    same tokens."""
    host: str = LOOPBACK
    """Address that it listens on."""
    port: int = 0
    """0 picks a free one."""
    threads: int = 1
    """Compute threads on a CPU."""
    device: str | None = None
    """The visible GPUs or NPUs; None for all."""
    experts: bool = False
    """True records which experts of a mixture each token is routed to."""
    kept: bool = False
    """True reports which tokens truncated sampling kept."""
    sleeps: bool = False
    """True lets `Client.sleep` release its memory."""
    lora_rank: int = 0
    """Rank of the adapters that it will load, of the largest if there are several; 0 for none."""
    lora_batched: int = 0
    """Adapters that one batch may use; 0 for the program's default."""
    metrics: bool = False
    """True counts what `Client.load_figures` returns."""
    widths: Widths = field(default_factory=Widths)
    """The parallel sizes."""
    speculation: Speculation = NOTHING
    """Tokens that it guesses ahead."""
    arguments: Sequence[str] = ()
    part: Part | None = None
    """The part of the server that this is; None if it is on one host."""

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Returns the command line. Raises: ConfigError for what the program does not support on
        this machine."""

    @abstractmethod
    def environment(self, key: str) -> dict[str, str]:
        """Returns the server's environment. It carries the key, which never appears on a command
        line or in a log."""

    @abstractmethod
    def client(self, url: str, key: str) -> Client:
        """Returns a client of the started server."""


class StartedServer(Protocol):
    """A server that the run started, here or on another node. None of its methods but `stop`
    waits."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Returns the exit code of its process; None while it runs."""
        ...

    def failure_reason(self) -> str:
        """Returns the lines of the log that tell why it ended."""
        ...

    def last_line(self) -> str:
        """Returns the newest line of the log, as a sentence."""
        ...

    def release(self) -> None:
        """Releases the port that is reserved for the server."""
        ...

    def terminate(self) -> None:
        """Tells the server to end. Harmless if it has already ended."""
        ...

    def stop(self) -> None:
        """Ends the server and everything it started; returns when they are gone. Harmless if it has
        already ended."""
        ...


class Starter(Protocol):
    """Starts the servers of a run. Each has a number of its own."""

    keeps: bool
    """True if servers go on when their engine is closed, for the next one."""

    async def start(self, number: int, launch: Launch) -> StartedServer:
        """Starts a server, and returns before it is ready. Raises: UserError, EngineError."""
        ...

    def departing(self) -> set[int]:
        """Returns the servers on machines that are about to go. May wait; for a thread of its
        own."""
        ...

    def vacate(self, number: int) -> None:
        """Gives the room of a server back, which has ended or was never started. May wait."""
        ...


def end_all(servers: Sequence[StartedServer]) -> None:
    """Ends servers; returns when they are gone."""
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()  # all at once, before waiting for each
    for server in servers:
        server.stop()


@dataclass(frozen=True)
class Server:
    """A server process on this machine (StartedServer)."""

    process: subprocess.Popen[bytes]
    url: str
    key: str = field(repr=False)
    log: Path
    log_start: int
    """Offset in the log file at which its own lines begin."""
    reserved: socket.socket | None = field(default=None, repr=False, compare=False)
    """Keeps the port for the server until it listens there, which takes as long as its imports."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def failure_reason(self) -> str:
        return failure_in(read_log(self.log, self.log_start))

    def last_line(self) -> str:
        return last_line_in(read_log(self.log, self.log_start, LAST_BYTES))

    def release(self) -> None:
        if self.reserved is not None:
            self.reserved.close()

    def terminate(self) -> None:
        self.process.terminate()

    def stop(self) -> None:
        self.release()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ThisMachine:
    """Starts servers on this machine (Starter)."""

    keeps = False

    async def start(self, number: int, launch: Launch) -> StartedServer:
        return start(launch)

    def departing(self) -> set[int]:
        return set()

    def vacate(self, number: int) -> None: ...


def start(launch: Launch, owns_staging: bool = True) -> Server:
    """Starts the process and returns before it is ready. owns_staging: the staged weights are
    removed if this process is killed.

    Raises: ConfigError if the port is taken, or for what the server does not support on this
    machine.
    """
    key = secrets.token_urlsafe(32)
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    reserved = reserve(launch.host, launch.port, f"{launch.kind.lower()}.port")
    try:
        with launch.log.open("ab") as log:
            port, log_start = reserved.getsockname()[1], log.tell()
            process = subprocess.Popen(
                guard.command(
                    watchdog.__name__,
                    os.getpid(),
                    str(launch.staging) if owns_staging else "",
                    launch.command(port),
                    flags=("-I",),
                ),
                env=launch.environment(key),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only the run, which then stops its servers in order
                start_new_session=True,
            )
    except BaseException:
        reserved.close()
        raise
    return Server(process, url_of(launch.host, port), key, launch.log, log_start, reserved)


def reserve(host: str, port: int, binding: str = "port") -> socket.socket:
    """Returns a bound socket that reserves a port of this machine's address `host`: only the
    server, which binds with SO_REUSEADDR too, can take it. binding: that the port was given as."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise ConfigError(binding, port, f"a free port ({error.strerror}); 0 picks one") from error
    return reserved


async def wait_until_ready(
    server: StartedServer, launch: Launch, name: str, timeout_seconds: float, report: Report
) -> None:
    """Returns when the server responds. Raises UserError with the reason from the log if it dies or
    takes too long."""
    client = launch.client(server.url, server.key)
    setting = f"{launch.kind.lower()}.start_timeout_seconds"
    began = reported = time.monotonic()
    report(f"{name} is starting (log: {server.log})")
    try:
        with waiting(name, "its process to be ready", server.last_line):
            while not await is_ready(client):
                now = time.monotonic()
                if server.poll() is not None:
                    raise UserError(
                        f"{name} died at start: {server.failure_reason()} (log: {server.log})"
                    )
                if now - began > timeout_seconds:
                    late = f"{name} was not ready within {timeout_seconds:.0f} s"
                    raise UserError(f"{late}: see {server.log} or raise {setting}")
                if now - reported > REPORT_SECONDS:
                    report(f"{name} is starting: {now - began:.0f} s")
                    reported = now
                await asyncio.sleep(POLL_SECONDS)
    finally:
        server.release()
        await client.close()
    report(f"{name} is ready after {time.monotonic() - began:.0f} s")


async def is_ready(client: Client) -> bool:
    try:
        return await client.is_healthy()
    except OutOfFiles:  # temporary: descriptors become free as other requests end
        return False
