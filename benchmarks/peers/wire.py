"""Communication of a benchmark with the programs that it compares: one process each, alive for the whole run, on command.

Long-lived processes take turns, so that other load on the machine affects all of them alike, and compilation happens once. A
process that is not at work is stopped (SIGSTOP): it can neither spin on a core nor, if it is asynchronous, work ahead.

Standard library only: the programs run in environments that share nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class Channel:
    """The worker's end. Create it before any heavy import: output printed by libraries goes to the log and not among the
    answers."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # A stopped process would not notice the end of the benchmark.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def send(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yields each command; ends when the benchmark closes the pipe."""
        for line in iter(sys.stdin.readline, ""):
            yield json.loads(line)


class Steps:
    """Training steps in blocks of the size that each command requests.

    settle: waits until the last step's computation is over (JAX returns before it is). details: added to the answer, besides
    the seconds and those of the processor.
    """

    def __init__(
        self, channel: Channel, settle: Callable[[], None] = lambda: None, details: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._channel, self._settle, self._details = channel, settle, details
        self._commands = channel.commands()
        self._left = 0
        self._times: list[tuple[float, float]] = []

    def begin(self) -> bool:
        """Called at the start of every step. Waits for a command at the end of a block; returns False when there are no
        more."""
        if self._left == 0:
            self._answer()
            command = next(self._commands, None)
            if command is None:
                return False
            self._left = command["steps"]
        self._left -= 1
        self._times.append(_clocks())
        return True

    def _answer(self) -> None:
        self._settle()
        times = [*self._times, _clocks()]
        self._times = []
        seconds, processor = ([after - before for before, after in pairwise(of_clock)] for of_clock in zip(*times, strict=True))
        self._channel.send(seconds=seconds, processor=processor, **self._details())


def _clocks() -> tuple[float, float]:
    """Seconds that have passed, and those of the processor that this process had."""
    return time.perf_counter(), time.process_time()


class Worker:
    """The benchmark's end: a program started with `command`, whose first answer reports that it is ready.

    frozen: stopped while it is not at work. Its standard error is written to `log`.
    """

    def __init__(self, name: str, command: list[str], log: Path, frozen: bool = True) -> None:
        self.name, self._log, self._frozen = name, log, frozen
        self._unread = b""
        pipe = subprocess.PIPE
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0, start_new_session=True
                )
        except OSError as error:
            raise SystemExit(f"{name} cannot be started: {error}") from error

    def ready(self, timeout_seconds: float = 300) -> dict[str, Any]:
        """Returns the first answer."""
        answer = self._read(timeout_seconds)
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, timeout_seconds: float = 600, **command: Any) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        answer = self._read(timeout_seconds)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self, timeout_seconds: float = 30) -> None:
        """Closes the pipe, gives the program time to end by itself, then kills it and all that it started."""
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def _signal(self, number: int) -> None:
        if self._frozen and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SystemExit(f"{self.name} gave no answer in {timeout_seconds:.0f} s{self._last_words()}")
            if select.select([self._process.stdout], [], [], left)[0]:
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise SystemExit(f"{self.name} ended{self._last_words()}")
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return ", its log's last lines:\n  " + "\n  ".join(lines)


def start(commands: Mapping[str, list[str]], directory: Path, running: ExitStack) -> list[Worker]:
    """Starts one process each, one after the other because loading is work too; `running` ends them. Logs are in the
    directory."""
    workers = []
    for name, command in commands.items():
        workers.append(Worker(name, command, directory / f"{name.replace(' ', '-').replace(':', '-')}.log"))
        running.callback(workers[-1].close)
        workers[-1].ready()
        print(f"{name} is ready", file=sys.stderr)
    return workers
