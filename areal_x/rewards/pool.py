"""Rewards in processes of their own, so that one which hangs, crashes or forks costs one episode
and nothing else.

A reward is a plain function `reward(task, text) -> float`, or `-> (float, {name: float})` with the
verifier's own numbers. It may do what it likes for `timeout_seconds` within its `Limits`; then its
process and all that this process started are killed. What runs on the other side is
areal_x.rewards.worker.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import cloudpickle
import gin

from areal_x.errors import UserError, at_least, positive
from areal_x.rewards import worker as worker_side
from areal_x.runtime import guard as guarding
from areal_x.runtime import memory_group, timeline
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Failed, Outcome, Scored, Task, TimedOut

Reward = Callable[[Task, str], float | tuple[float, Mapping[str, float]]]

LOG = logging.getLogger(__name__)
START_SECONDS = 120.0  # for the imports of the reward's module, on a machine that is busy
ANSWER_BYTES = 1 << 20


@gin.configurable("reward_limits")
@dataclass(frozen=True)
class Limits:
    """What the process of a reward may use beside time; what goes beyond fails its episode.

    memory_gb: of each process, and of all together (10^9 bytes). processes: at once, itself and all
    that it started. files: open at once in each process. file_gb: of one file that it writes.
    network: whether it may reach one, as a judge behind an API must; to keep it from there, and to
    find each process that it started, needs Linux (a run says where it is not allowed).
    """

    memory_gb: float = 8.0
    processes: int = 32
    files: int = 1024
    file_gb: float = 1.0
    network: bool = False

    def __post_init__(self) -> None:
        positive("reward_limits.memory_gb", self.memory_gb)
        at_least("reward_limits.processes", self.processes, 1)
        at_least("reward_limits.files", self.files, 16)
        positive("reward_limits.file_gb", self.file_gb)


@dataclass(frozen=True, eq=False)
class _Worker:
    """A worker seen from here: its guard (see areal_x.runtime.guard), the lifeline's only writing
    end, and the socket."""

    guard: subprocess.Popen[bytes]
    lifeline: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        os.close(self.lifeline)
        self.writer.close()


class RewardPool:
    """Runs `function` in up to `workers` processes, started when they are first needed.

    groups: control groups limit memory, where the run may make them.

    All methods but the constructor belong to one event loop, which they never block. Raises
    UserError for a function that cannot be sent to another process, ConfigError for numbers that
    cannot work.
    """

    def __init__(
        self,
        function: Reward,
        workers: int = 4,
        timeout_seconds: float = 10.0,
        limits: Limits | None = None,
        groups: bool = True,
    ) -> None:
        at_least("reward_workers", workers, 1)
        positive("reward_timeout_seconds", timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self.limits = limits or Limits()
        self._warned = False
        self._name = getattr(function, "__qualname__", repr(function))
        self._reward = _packed(function, self._name)
        self._turn = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._ending: list[subprocess.Popen[bytes]] = []
        self._may_group = groups
        self._groups = f"areal_x_rewards_{secrets.token_hex(6)}"

    async def score(self, task: Task, text: str) -> Outcome:
        """What became of judging this text. The limit counts from when a worker is free and ready.

        Raises UserError when the reward cannot even be imported in a worker.
        """
        try:
            message = cloudpickle.dumps((task, text))
        except Exception as error:
            return Failed(
                f"task {task.id} cannot be sent to a reward process: {worker_side.one_line(error)}"
            )
        with waiting(whose(), "a free reward process", self._name):
            await self._turn.acquire()
        try:
            worker = self._idle.pop() if self._idle else await self._start()
            answer: dict[str, Any] | None = None
            try:
                about = f"{self._name} of task {task.id} in process {worker.guard.pid}"
                with timeline.span("reward", task=task.id), waiting(whose(), "its reward", about):
                    async with asyncio.timeout(self.timeout_seconds):
                        answer = await _ask(worker, message)
            except TimeoutError:
                return TimedOut(self.timeout_seconds)
            finally:
                # too slow, cancelled or crashed: it is busy or gone, and its place is for a new one
                if answer is None:
                    self._end(worker)
                else:
                    self._idle.append(worker)
            if answer is None:
                return Failed(f"the reward's process ended: {await self._last_word(worker)}")
            if "error" in answer:
                return Failed(answer["error"], answer["traceback"])
            return Scored(answer["reward"], answer["details"])
        finally:
            self._turn.release()

    async def close(self) -> None:
        """Ends every worker; returns when the processes are gone. Safe to call twice."""
        self._idle.clear()
        for worker in list(self._all):
            self._end(worker)
        ending, self._ending = self._ending, []
        with waiting(
            "the rollout",
            "its reward processes to end",
            ", ".join(f"process {guard.pid}" for guard in ending),
        ):
            for guard in ending:
                await asyncio.to_thread(guarding.ended, guard)
            # of guards that were killed
            await asyncio.to_thread(memory_group.remove_all, f"{self._groups}.")

    async def _start(self) -> _Worker:
        """A process that has imported the reward. Raises UserError with its words when it could
        not."""
        name = f"{self._groups}.{secrets.token_hex(4)}"
        here, there = socket.socketpair()
        with there:
            reader, writer = await asyncio.open_connection(sock=here, limit=ANSWER_BYTES)
            lifeline_end, lifeline = os.pipe()
            try:
                guard = subprocess.Popen(
                    guarding.command(
                        worker_side.__name__,
                        there.fileno(),
                        lifeline_end,
                        asdict(self.limits),
                        name,
                        self._may_group,
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward prints joins the ring's standard error
                    pass_fds=(there.fileno(), lifeline_end),
                    start_new_session=True,  # an interrupt at the terminal is the ring's to handle
                )
            except BaseException:
                writer.close()
                os.close(lifeline)
                raise
            finally:
                os.close(lifeline_end)
        worker = _Worker(guard, lifeline, reader, writer)
        self._all.add(worker)
        answer: dict[str, Any] | None = None
        try:
            path = json.dumps([entry or str(Path.cwd()) for entry in sys.path]).encode()
            with waiting(
                whose(), "a reward process to start", f"{self._name} in process {guard.pid}"
            ):
                async with asyncio.timeout(START_SECONDS):
                    answer = await _ask(worker, path, self._reward)
        except TimeoutError:
            raise UserError(
                f"the reward {self._name} did not start in its process within {START_SECONDS:g}"
                " seconds"
            ) from None
        finally:
            if answer is None or "error" in answer:
                self._end(worker)
        if answer is None:
            raise UserError(
                f"the process of the reward {self._name} ended at its start:"
                f" {await self._last_word(worker)}"
            )
        if "error" in answer:
            raise UserError(
                f"the reward {self._name} cannot be imported in a process of its own:"
                f" {answer['error']}"
            )
        if not answer["offline"] and not self._warned:
            self._warned = True
            LOG.warning(
                "rewards can reach the network, as this machine allows no namespace without one"
            )
        return worker

    def _end(self, worker: _Worker) -> None:
        """Kills the worker and all it has started, without waiting."""
        if worker in self._all:
            self._all.discard(worker)
            worker.kill()
            self._ending = [guard for guard in self._ending if guard.poll() is None] + [
                worker.guard
            ]

    async def _last_word(self, worker: _Worker) -> str:
        with waiting(whose(), "its reward process to end", f"process {worker.guard.pid}"):
            code = await asyncio.to_thread(guarding.ended, worker.guard)
        if code == -guarding.TOO_MANY:
            return f"it had more than {self.limits.processes} processes (reward_limits.processes)"
        if code == -guarding.TOO_MUCH:
            return (
                f"its processes used more than {self.limits.memory_gb:g} GB of memory"
                " (reward_limits.memory_gb)"
            )
        return (
            signal.Signals(code - 128).name
            if code - 128 in signal.valid_signals()
            else f"exit status {code}"
        )


async def _ask(worker: _Worker, *messages: bytes) -> dict[str, Any] | None:
    """Sends messages and reads one answer; None when the worker has gone."""
    try:
        for message in messages:
            worker.writer.write(len(message).to_bytes(worker_side.FRAME_BYTES, "big") + message)
        await worker.writer.drain()
        line = await worker.reader.readline()
    except (ConnectionError, ValueError):  # ValueError: longer than any answer is
        return None
    if not line.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _packed(function: Reward, name: str) -> bytes:
    """The function and its gin parameters for the worker, which reads no gin file: by name where it
    can be imported, else by value (a notebook's cell, a script's function, a partial)."""
    function, bound = _bindings(function)
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        named = reduce(getattr, path.split("."), sys.modules[module or ""])
    except (KeyError, AttributeError):
        named = None
    importable = module != "__main__" and any(
        function is x for x in (named, getattr(named, "__wrapped__", None))
    )
    try:
        return bytes(
            cloudpickle.dumps(
                (f"{module}:{path}", None, bound) if importable else (None, function, bound)
            )
        )
    except Exception as error:
        raise UserError(
            f"the reward {name} cannot be sent to a process of its own"
            f" ({worker_side.one_line(error)}): define it at the top level of a module, without"
            " open files, locks or models"
        ) from None


def _bindings(function: Reward) -> tuple[Reward, dict[str, Any]]:
    """A gin configurable as the function that it wraps and the parameters that are bound; any other
    function as it is."""
    scope: list[str] = []
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if "scope_components" in closure:  # what gin makes of @scope/name
        function, scope = closure["fn_or_cls"], closure["scope_components"]
    try:
        with gin.config_scope("/".join(scope) or None):
            bound = gin.get_bindings(function)
    except (ValueError, TypeError):
        return function, {}
    wraps = getattr(function, "__globals__", {}).get("__name__") == gin.config.__name__
    return getattr(function, "__wrapped__", function) if wraps else function, dict(bound)
