"""Runs a model's code where it can do no harm: no network, limits on everything, a folder of its
own.

    sandbox = Sandbox(SandboxLimits(seconds=5), workers=4)
    result = await sandbox.run("print(6 * 7)")   # ProgramResult(output="42\\n", error=None, status="ok", …)

The other side is areal_x.sandbox.fork_server; docs/sandbox.md describes what a program can and
cannot do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

import gin

from areal_x.errors import ConfigError, UserError, at_least, one_of, positive
from areal_x.runtime import guard, memory_group
from areal_x.runtime.hosts import Hosts, Spread
from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox import fork_server
from areal_x.sandbox.isolation import MECHANISMS, group_name
from areal_x.sandbox.namespaces import readable
from areal_x.sandbox.supervisor import LENGTH_BYTES

Status = Literal["ok", "error", "timeout", "memory", "killed"]

LOG = logging.getLogger(__name__)
START_SECONDS = 120.0  # for imports, on a busy machine
GRACE_SECONDS = 60.0  # beyond a program's own time, for its supervisor on a busy machine
ENVIRONMENT = {  # of programs, which see none of the run's variables
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "nobody",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
UNCONFINED = {  # what a program can do, by the missing part of the isolation
    "files": "read and write this machine's files, as it allows neither namespaces nor Landlock",
    "network": "reach the network, as this machine allows no namespace without one",
    "processes": "send signals to this run's processes, as this machine allows no namespaces",
    "calls": "make any system call, as this machine allows no system call filter",
}


@gin.configurable("sandbox")
@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program. A program that exceeds one is killed, and the model reads why."""

    seconds: float = 10.0
    """Seconds from start to end."""
    cpu_seconds: float = 10.0
    """Seconds of processor time, in each of its processes."""
    memory_mb: float = 1024.0
    """Memory of each process, and of all together with their files if those are in memory, in 10^6
    bytes."""
    output_characters: int = 8000
    """Most characters of output; of more, the first and the last half are shown."""
    processes: int = 32
    """Most processes and threads at once, itself included."""
    file_mb: float = 64.0
    """Size of all files in its folder, in 10^6 bytes."""
    files: int = 1000
    """Most files in its folder at once."""
    require_confined: bool = False
    """If True, stop rather than run a program with incomplete isolation (docs/sandbox.md)."""

    def __post_init__(self) -> None:
        for name in ("seconds", "cpu_seconds", "file_mb"):
            positive(f"sandbox.{name}", getattr(self, name))
        at_least("sandbox.memory_mb", self.memory_mb, 32)
        at_least("sandbox.output_characters", self.output_characters, 16)
        at_least("sandbox.processes", self.processes, 1)
        at_least("sandbox.files", self.files, 1)


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    output: standard output and standard error, in order. error: a traceback or a sentence, at most
    about as long as `output`; None without an error. truncated: True if the middle of `output` is
    missing, which the output also states. seconds: from start to end. status: "ok"; "error" (an
    exception, or a nonzero exit status); "timeout"; "memory"; "killed" (by a signal, or for
    exceeding another limit). confined: True if the isolation was complete (files, network,
    processes, calls).
    """

    output: str
    error: str | None
    truncated: bool
    seconds: float
    status: Status
    confined: bool = True

    def text(self) -> str:
        """Returns the text that the model reads."""
        output = self.output.rstrip("\n")
        shown = "\n".join(part for part in (output, self.error) if part)
        return shown or "(the program printed nothing)"


@dataclass(frozen=True, eq=False)
class _ForkServer:
    """A fork server, seen from the pool: its guard (areal_x.runtime.guard), the only writing end of
    the lifeline, and the socket for requests."""

    guard: subprocess.Popen[bytes]
    lifeline: int
    control: socket.socket
    base: str
    confined: bool

    def has_exited(self) -> bool:
        """Returns True if the fork server has ended: after its first message it sends nothing, so
        the only thing to read is the end of the stream."""
        try:
            return not self.control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    async def end(self) -> None:
        """Returns when all of its processes are gone, even if the guard, whose task this is, was
        itself killed."""
        os.close(self.lifeline)
        self.control.close()
        with waiting(whose(), "the sandbox to end", f"process {self.guard.pid}"):
            await asyncio.to_thread(guard.wait_until_ended, self.guard)
            await asyncio.to_thread(guard.remove_tree, self.base)
            await asyncio.to_thread(memory_group.remove_all, group_name(self.base, ""))


class Programs(Protocol):
    """Runs programs: a Sandbox, or several."""

    async def start(self) -> None: ...

    async def run(self, code: str, stdin: str = "") -> ProgramResult: ...

    async def close(self) -> None: ...


class Sandbox:
    """Runs up to `workers` programs at once; further ones wait.

    echo_last: prints the value of a last line that is an expression, as a notebook does. packages:
    programs can import the packages installed beside the run. imports: modules imported in advance,
    so that programs start faster. mechanisms: the isolation mechanisms that may be used, tried in
    the order of `MECHANISMS`; if none is allowed, programs still run, after a warning. groups:
    limit memory by control groups, if the run may create them.

    All methods except the constructor belong to one event loop, which they never block. Nothing
    that a program does raises. `like` makes another sandbox with the same arguments.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        workers: int = 4,
        *,
        echo_last: bool = False,
        packages: bool = True,
        imports: Sequence[str] = (),
        mechanisms: Sequence[str] = MECHANISMS,
        groups: bool = True,
    ) -> None:
        at_least("workers", workers, 1)
        for mechanism in mechanisms:
            one_of("mechanisms", mechanism, MECHANISMS)
        self.limits = limits or SandboxLimits()
        self.workers = workers
        self.like = partial(
            Sandbox,
            self.limits,
            workers,
            echo_last=echo_last,
            packages=packages,
            imports=tuple(imports),
            mechanisms=tuple(mechanisms),
            groups=groups,
        )
        folders = site.getsitepackages() if packages else []
        self._settings = {
            "echo_last": echo_last,
            "packages": folders,
            "imports": list(imports),
            "mechanisms": list(mechanisms),
            "groups": groups,
            "readable": readable(folders),
        }
        self._slots = asyncio.Semaphore(workers)
        self._starting = asyncio.Lock()
        self._fork_server: _ForkServer | None = None
        self._warned: set[str] = set()

    async def start(self) -> None:
        """Starts the fork server; `run` does it too if necessary.

        Raises: UserError on systems other than Linux, for `imports` that fail, or if
        `require_confined` cannot be met.
        """
        await self._ready()

    async def run(self, code: str, stdin: str = "") -> ProgramResult:
        """Runs a Python program and returns its result. If cancelled, ends the program and
        everything that it started.

        Raises: UserError as `start` does.
        """
        with waiting(whose(), "a free place in the sandbox", f"{self.workers} programs run"):
            await self._slots.acquire()
        try:
            server = await self._ready()
            with waiting(whose(), "its program in the sandbox", f"{len(code)} characters"):
                answer = await self._request(server, {"code": code, "stdin": stdin})
            return self._result(answer, server.confined)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Ends everything; returns when the processes are gone. Safe to call twice."""
        server = self._fork_server
        self._fork_server = None
        if server is not None:
            await server.end()

    async def _ready(self) -> _ForkServer:
        async with self._starting:
            if self._fork_server is not None and self._fork_server.has_exited():
                await self.close()
            if self._fork_server is None:
                self._fork_server = await self._start()
            return self._fork_server

    async def _start(self) -> _ForkServer:
        if sys.platform != "linux":
            raise UserError("the sandbox for programs needs Linux, whose kernel isolates them")
        here, there = socket.socketpair()
        lifeline_end, lifeline = os.pipe()
        base = tempfile.mkdtemp(prefix="areal_x_sandbox_")
        with there:
            try:
                settings = {**asdict(self.limits), **self._settings}
                process = subprocess.Popen(
                    guard.command(
                        fork_server.__name__,
                        there.fileno(),
                        lifeline_end,
                        base,
                        settings,
                        flags=("-I", "-S"),
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=ENVIRONMENT,
                    pass_fds=(there.fileno(), lifeline_end),
                    start_new_session=True,  # an interrupt at the terminal is the run's to handle
                )
            except BaseException:
                here.close()
                os.close(lifeline)
                os.rmdir(base)  # noqa: PTH106
                raise
            finally:
                os.close(lifeline_end)
        here.setblocking(False)
        hello: dict[str, Any] | None = None
        try:
            with waiting(whose(), "the sandbox to start", f"process {process.pid}"):
                async with asyncio.timeout(START_SECONDS):
                    hello = await _first_line(here)
        except TimeoutError:
            raise UserError(f"the sandbox did not start within {START_SECONDS:g} seconds") from None
        finally:
            missing = [
                wall for wall in UNCONFINED if hello is not None and not hello["isolation"][wall]
            ]
            refused = bool(missing) and self.limits.require_confined
            if hello is None or hello["missing"] or refused:
                os.close(lifeline)
                here.close()
        if hello is None:
            with waiting(whose(), "the sandbox to end", f"process {process.pid}"):
                code = await asyncio.to_thread(guard.wait_until_ended, process)
            raise UserError(
                f"the process of the sandbox ended at its start (exit status {code}): its error"
                " output is above"
            )
        if hello["missing"] or refused:
            with waiting(whose(), "the sandbox to end", f"process {process.pid}"):
                await asyncio.to_thread(guard.wait_until_ended, process)
        if hello["missing"]:
            name, error = next(iter(hello["missing"].items()))
            raise ConfigError(
                "imports", name, f"a module that programs of the sandbox can import ({error})"
            )
        if refused:
            raise UserError(
                f"sandbox.require_confined = True, and programs here could {UNCONFINED[missing[0]]}:"
                " start the run where namespaces or Landlock are allowed (docs/sandbox.md), or set"
                " sandbox.require_confined = False"
            )
        for wall in missing:
            if wall not in self._warned:
                self._warned.add(wall)
                LOG.warning("programs in the sandbox can %s", UNCONFINED[wall])
        return _ForkServer(process, lifeline, here, base, confined=not missing)

    async def _request(self, server: _ForkServer, request: dict[str, str]) -> dict[str, Any] | None:
        """Returns the supervisor's answer; None if the supervisor or the fork server is gone."""
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=here)
        try:
            with there:
                socket.send_fds(server.control, [b"p"], [there.fileno()])
            data = json.dumps(request).encode()
            writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            async with asyncio.timeout(self.limits.seconds + GRACE_SECONDS):
                answer = await reader.read()
        except (ConnectionError, TimeoutError):
            answer = b""
        finally:
            writer.close()
        return json.loads(answer) if answer else None

    def _result(self, answer: dict[str, Any] | None, confined: bool) -> ProgramResult:
        if answer is None:
            return ProgramResult(
                "", "the program's process was ended from outside", False, 0.0, "killed", confined
            )
        head, tail = answer["output"]
        output, truncated = shorten(head, tail, answer["dropped"], self.limits.output_characters)
        error = answer["error"]
        if error is not None:
            error, _ = shorten(error, "", False, self.limits.output_characters)
        return ProgramResult(
            output, error, truncated, answer["seconds"], answer["status"], confined
        )


def shorten(head: str, tail: str, dropped: bool, most: int) -> tuple[str, bool]:
    """Returns at most about `most` characters of a text, and True if some are missing: those
    between head and tail already are if `dropped`."""
    if not dropped and len(head) + len(tail) <= most:
        return head + tail, False
    whole = tail if dropped else head + tail
    first = head[: most // 2]
    last = whole[-(most // 2) :]
    return (
        (
            f"{first}\n[output truncated: the first {len(first)} and the last {len(last)}"
            f" characters are shown]\n{last}"
        ),
        True,
    )


class SpreadSandbox:
    """A sandbox of this process, and others like it on the hosts of a run."""

    def __init__(self, sandbox: Sandbox, hosts: Hosts) -> None:
        self._own = sandbox
        self._spread = Spread(
            sandbox, sandbox.like, sandbox.workers, hosts, f"{sandbox.workers} programs run on each"
        )

    async def start(self) -> None:
        """Starts this process's own, to raise what is wrong. Raises: as Sandbox.start."""
        await self._own.start()

    async def run(self, code: str, stdin: str = "") -> ProgramResult:
        """Runs a program where the fewest run. Raises: as Sandbox.run."""
        result: ProgramResult = await self._spread.call("run", code, stdin)
        return result

    async def close(self) -> None:
        """Ends all sandboxes."""
        await self._spread.close()


async def _first_line(control: socket.socket) -> dict[str, Any] | None:
    """Returns None if the other side is gone first."""
    data = b""
    while not data.endswith(b"\n"):
        more = await asyncio.get_running_loop().sock_recv(control, 1 << 16)
        if not more:
            return None
        data += more
    found: dict[str, Any] = json.loads(data)
    return found
