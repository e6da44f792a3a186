"""The process above one program, outside its isolation: enforces the limits, collects the output,
and ends everything that the program started."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from select import POLLERR, poll, select
from typing import Any, NoReturn

from areal_x.runtime import footprint, guard, memory_group
from areal_x.sandbox import namespaces, program
from areal_x.sandbox.isolation import Isolation, KernelLimits, enter, group_name, program_folder
from areal_x.sandbox.verdict import verdict

LENGTH_BYTES = 8  # of the request's length prefix
AT_ONCE = 1 << 16  # bytes
REPORT_BYTES = 1 << 20
LOOK_FOR_MEMORY = 0.02  # seconds between two checks, if the kernel does not limit memory
# not counted as the program's; so a single process meets the kernel's limit on it first, and gets a
# MemoryError
INTERPRETER_BYTES = 50e6

Settings = Mapping[str, Any]  # as areal_x.sandbox.pool sends them


@dataclass
class HeadAndTail:
    """The first and the last `most` bytes of a stream."""

    most: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: bool = False

    def add(self, data: bytes) -> None:
        room = self.most - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > self.most:
            self.dropped = True
            del self.tail[: -self.most]


@dataclass
class RunningProgram:
    """A program as its supervisor sees it. child: the first process inside the isolation. wakeup,
    output, report: pipes to read, for ended children, printed output, and the error report. began:
    a monotonic time in seconds."""

    child: int
    wakeup: int
    output: int
    report: int
    folder: str
    began: float
    kept: HeadAndTail
    group: memory_group.MemoryGroup | None
    reported: bytearray = field(default_factory=bytearray)


def supervise(pool: socket.socket, isolation: Isolation, base: str, settings: Settings) -> None:
    """Handles one request. Returns without an answer if the pool hung up."""
    group: memory_group.MemoryGroup | None = None
    guard.LIBC.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    request = _receive(pool)
    if request is None:
        return
    folder = program_folder(isolation, base)
    try:
        if isolation.groups is not None:
            name = group_name(base, os.getpid())
            group = memory_group.create(
                isolation.groups, name, settings["memory_mb"] * 1e6 + INTERPRETER_BYTES
            )
        running = _start(pool, request, isolation, base, folder, wakeup, group, settings)
        reason = watch(running, pool, isolation, settings)
        code = guard.end_all(running.child)
        if reason == "ended" and group is not None and group.overrun():
            reason = "memory"
        if reason == "hung up":
            return
        for _ in _read(running):
            pass
        seconds = time.monotonic() - running.began
    finally:
        if not isolation.uses_namespaces:
            guard.remove_tree(folder)
        if group is not None:
            group.remove()
    kept = running.kept
    both = (kept.head, kept.tail) if kept.dropped else (kept.head + kept.tail, b"")
    parts = [bytes(part).decode(errors="replace") for part in both]
    answer = {
        **verdict(reason, code, bytes(running.reported), settings),
        "output": parts,
        "dropped": kept.dropped,
        "seconds": seconds,
    }
    with suppress(OSError):  # the pool no longer waits
        pool.sendall(json.dumps(answer).encode())


def _start(
    pool: socket.socket,
    request: dict[str, str],
    isolation: Isolation,
    base: str,
    folder: str,
    wakeup: int,
    group: memory_group.MemoryGroup | None,
    settings: Settings,
) -> RunningProgram:
    began = time.monotonic()
    output, outputs = os.pipe()
    report, reports = os.pipe()
    if isolation.uses_namespaces:
        namespaces.new_process_namespace()
    supervisor = os.getpid()
    with _standard_input(request["stdin"]) as stdin:
        child = os.fork()
        if child == 0:
            for number, fd in enumerate((stdin, outputs, outputs, reports)):
                os.dup2(fd, number)
            os.closerange(4, 64)  # the supervisor's own
            pool.detach()
            run_then_exit(
                partial(
                    _run_inside,
                    request["code"],
                    isolation,
                    base,
                    folder,
                    supervisor,
                    group,
                    settings,
                )
            )
    os.close(outputs)
    os.close(reports)
    os.set_blocking(output, False)
    os.set_blocking(report, False)
    return RunningProgram(
        child=child,
        wakeup=wakeup,
        output=output,
        report=report,
        folder=folder,
        began=began,
        kept=HeadAndTail(2 * settings["output_characters"]),
        group=group,
    )


def _run_inside(
    code: str,
    isolation: Isolation,
    base: str,
    folder: str,
    supervisor: int,
    group: memory_group.MemoryGroup | None,
    settings: Settings,
) -> int:
    """Runs in the first process inside. The descriptors are 0 to 2 and, for the report, 3."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        if group is not None:
            group.enter()
        enter(
            isolation,
            base,
            folder,
            supervisor,
            KernelLimits(**{name: settings[name] for name in KernelLimits.__dataclass_fields__}),
        )
        # ends with its supervisor; set here because a change of credentials resets it
        guard.LIBC.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
        if _has_no_reader(3):
            return 1  # the supervisor ended first
        running = os.fork() if isolation.uses_namespaces else 0
    except OSError as error:
        os.write(
            3,
            json.dumps(
                {"status": "killed", "error": f"the sandbox could not start the program: {error}"}
            ).encode(),
        )
        return 1
    if running:
        return _reap_as_init(running)
    _open_standard_files()
    for name in [name for name in sys.modules if name.split(".")[0] == "areal_x"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    return program.run(code, folder, 3, settings["echo_last"], settings["output_characters"])


def _has_no_reader(fd: int) -> bool:
    """Returns True if the reading end of a pipe is closed."""
    state = poll()
    state.register(fd, 0)
    return any(event & POLLERR for _, event in state.poll(0))


def _reap_as_init(running: int) -> int:
    """Runs in the first process of a process namespace: reaps orphans, and ends the rest with its
    own end."""
    os.closerange(0, 4)
    while True:
        pid, status = os.wait()
        if pid == running:
            return guard.shell_exit_code(os.waitstatus_to_exitcode(status))


def _open_standard_files() -> None:
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = open(  # noqa: SIM115
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, opened)


def watch(
    running: RunningProgram, pool: socket.socket, isolation: Isolation, settings: Settings
) -> str:
    """Waits until the program has ended, or must be ended; returns "ended", or the reason:
    "timeout", "memory", "processes", "files", "hung up"."""
    every = guard.POLL_SECONDS if running.group is not None else LOOK_FOR_MEMORY
    end = running.began + settings["seconds"]
    look = running.began + every

    def timeout() -> float:
        return float(min(end, look) - time.monotonic())

    for ready in _read(running, pool.fileno(), timeout):
        if pool.fileno() in ready:
            return "hung up"
        if running.wakeup in ready and os.waitid(
            os.P_PID, running.child, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            return "ended"
        now = time.monotonic()
        if now >= end:
            return "timeout"
        if now >= look:
            look = now + every
            if beyond := _exceeded_limit(running, isolation, settings):
                return beyond
    raise AssertionError("reading ends by a return")


def _read(
    running: RunningProgram, pool: int | None = None, timeout: Callable[[], float] | None = None
) -> Iterator[list[int]]:
    """Reads what is available, and yields the descriptors that had something; without `timeout`
    until there is nothing left."""
    readers = {running.output, running.report}
    others = [pool, running.wakeup] if pool is not None else []
    while True:
        ready, _, _ = select([*readers, *others], [], [], max(0.0, timeout()) if timeout else 0)
        if not ready and timeout is None:
            return
        for fd in readers & set(ready):
            data = os.read(fd, AT_ONCE)
            if not data:
                readers.discard(fd)
            elif fd == running.output:
                running.kept.add(data)
            elif len(running.reported) < REPORT_BYTES:
                running.reported += data
        if running.wakeup in ready:
            os.read(running.wakeup, AT_ONCE)
        yield ready


def _exceeded_limit(
    running: RunningProgram, isolation: Isolation, settings: Settings
) -> str | None:
    """Checks the limits that the kernel does not enforce, or not for all processes together."""
    most = settings["processes"] + isolation.uses_namespaces  # init is not the program's
    below = list(islice(guard.descendants(os.getpid()), most + 1))
    if len(below) > most:
        return "processes"
    if not isolation.counts_processes and footprint.thread_count(below) > most:
        return "processes"
    if running.group is not None:
        if running.group.overrun():
            return "memory"
    else:
        most_bytes = settings["memory_mb"] * 1e6 + INTERPRETER_BYTES
        in_memory = namespaces.used_bytes(running.child) if isolation.uses_namespaces else 0
        if in_memory + footprint.memory_bytes(below, most_bytes - in_memory) > most_bytes:
            return "memory"
    if not isolation.uses_namespaces:
        most_file = settings["file_mb"] * 1e6
        sizes = list(islice(_sizes(running.folder), settings["files"] + 2))
        if (
            len(sizes) > settings["files"] + 1
            or sum(sizes) + footprint.deleted_file_bytes(below, most_file) > most_file
        ):
            return "files"
    return None


def _sizes(folder: str) -> Iterator[int]:
    for place, folders, files in os.walk(folder):
        yield from (0 for _ in folders)
        for name in files:
            with suppress(OSError):
                yield Path(place, name).lstat().st_size


@contextmanager
def _standard_input(text: str) -> Iterator[int]:
    """Opens a descriptor from which the text can be read, without a process that writes it."""
    if text:
        fd = os.memfd_create("stdin")
        data = text.encode(errors="surrogateescape")
        while data:
            data = data[os.write(fd, data) :]
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fd = os.open("/dev/null", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _receive(pool: socket.socket) -> dict[str, str] | None:
    """Returns the request; None if the pool hung up first."""
    with pool.makefile("rb") as stream:
        length = stream.read(LENGTH_BYTES)
        data = stream.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else b""
    request: dict[str, str] | None = json.loads(data) if data else None
    return request


def run_then_exit(work: Callable[[], int | None]) -> NoReturn:
    """Runs the rest of a forked process, which then exits: it never returns to the code that it was
    forked from."""
    code: int | None = 1
    try:
        code = work()
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code or 0)
