"""Runs reward functions in worker processes, so that one which hangs, crashes or forks costs one
episode and nothing else.

A reward is a plain function `reward(task, text) -> float`, or `-> (float, {name: float})` with the
verifier's own numbers. It may do anything for `timeout_seconds` within its `RewardLimits`; then its
process and everything that this process started are killed. The worker's side is
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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import cloudpickle
import gin

from areal_x.errors import UserError, at_least, positive
from areal_x.rewards import worker as worker_side
from areal_x.runtime import guard as guarding
from areal_x.runtime import memory_group, timeline
from areal_x.runtime.credentials import without_credentials
from areal_x.runtime.hosts import Hosts, Spread
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Failed, Outcome, Scored, Task, TimedOut

Reward = Callable[[Task, str], float | tuple[float, Mapping[str, float]]]

LOG = logging.getLogger(__name__)
START_SECONDS = 120.0  # to import the reward's module, on a busy machine
ANSWER_BYTES = 1 << 20


@gin.configurable("reward_limits")
@dataclass(frozen=True)
class RewardLimits:
    """Resource limits of a reward's process beside time. Exceeding one fails the episode."""

    memory_gb: float = 8.0
    """Memory of each process, and of all of them together, in 10^9 bytes."""

    processes: int = 32
    """Processes at once: the reward's own and all that it started."""

    files: int = 1024
    """Open files in each process."""

    file_gb: float = 1.0
    """Size of one file that it writes, in 10^9 bytes."""

    network: bool = False
    """Whether it may reach the network, as a judge behind an API must. Blocking the network, and
    finding every process that the reward started, need Linux; a run warns if the machine does not
    allow the blocking."""

    def __post_init__(self) -> None:
        positive("reward_limits.memory_gb", self.memory_gb)
        at_least("reward_limits.processes", self.processes, 1)
        at_least("reward_limits.files", self.files, 16)
        positive("reward_limits.file_gb", self.file_gb)


@dataclass(frozen=True)
class RewardSpec:
    """What a pool is made of, in a form that other processes can read."""

    name: str
    """Of the function, for messages."""

    reward: bytes
    """The function and its gin parameters, serialized for the workers."""

    workers: int
    timeout_seconds: float
    limits: RewardLimits
    groups: bool


@dataclass(frozen=True, eq=False)
class _Worker:
    """The pool's handles of a worker: its guard process (areal_x.runtime.guard), the only write end
    of the lifeline pipe, and the socket."""

    guard: subprocess.Popen[bytes]
    lifeline: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        os.close(self.lifeline)
        self.writer.close()


class RewardPool:
    """Runs `function` in up to `workers` processes, started on demand.

    groups: limit memory with control groups, if the run may make them.

    All methods except the constructor must be called from one event loop, and never block it.

    Raises: UserError for a function that cannot be sent to another process, ConfigError for invalid
    numbers.
    """

    def __init__(
        self,
        function: Reward,
        workers: int = 4,
        timeout_seconds: float = 10.0,
        limits: RewardLimits | None = None,
        groups: bool = True,
    ) -> None:
        at_least("reward_workers", workers, 1)
        positive("reward_timeout_seconds", timeout_seconds)
        name = getattr(function, "__qualname__", repr(function))
        self._begin(
            RewardSpec(
                name=name,
                reward=_serialize(function, name),
                workers=workers,
                timeout_seconds=timeout_seconds,
                limits=limits or RewardLimits(),
                groups=groups,
            )
        )

    @staticmethod
    def of(spec: RewardSpec) -> RewardPool:
        """Returns a pool like one of another process."""
        pool = RewardPool.__new__(RewardPool)
        pool._begin(spec)
        return pool

    def _begin(self, spec: RewardSpec) -> None:
        self.spec = spec
        self._warned = False
        self._slots = asyncio.Semaphore(spec.workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._ending: list[subprocess.Popen[bytes]] = []
        self._groups = f"areal_x_rewards_{secrets.token_hex(6)}"

    async def score(self, task: Task, text: str) -> Outcome:
        """Scores a text. The time limit starts when a worker is free and ready.

        Raises: UserError if the reward cannot be imported in a worker.
        """
        message = serialize_task(task, text)
        if isinstance(message, Failed):
            return message
        return await self.score_message(task.id, message)

    async def score_message(self, task_id: str, message: bytes) -> Outcome:
        """Scores what `serialize_task` returned. Raises: as `score`."""
        asked = time.perf_counter()
        with waiting(whose(), "a free reward process", self.spec.name):
            await self._slots.acquire()
        try:
            worker = self._idle.pop() if self._idle else await self._start()
            answer: dict[str, Any] | None = None
            try:
                about = f"{self.spec.name} of task {task_id} in process {worker.guard.pid}"
                queued = time.perf_counter() - asked
                with (
                    timeline.span("reward", task=task_id, of=whose(), queued=queued),
                    waiting(whose(), "its reward", about),
                ):
                    async with asyncio.timeout(self.spec.timeout_seconds):
                        answer = await _ask(worker, message)
            except TimeoutError:
                return TimedOut(self.spec.timeout_seconds)
            finally:
                # too slow, cancelled or crashed: the worker is busy or gone, so a new one replaces it
                if answer is None:
                    self._end(worker)
                else:
                    self._idle.append(worker)
            if answer is None:
                return Failed(f"the reward's process ended: {await self._exit_reason(worker)}")
            if "error" in answer:
                return Failed(answer["error"], answer["traceback"])
            return Scored(answer["reward"], answer["details"])
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Ends every worker and waits until the processes are gone. Safe to call twice."""
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
                await asyncio.to_thread(guarding.wait_until_ended, guard)
            # control groups left behind by guards that were killed
            await asyncio.to_thread(memory_group.remove_all, f"{self._groups}.")

    async def _start(self) -> _Worker:
        """Starts a process and waits until it has imported the reward. Raises: UserError with the
        process's own message if it could not."""
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
                        asdict(self.spec.limits),
                        name,
                        self.spec.groups,
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a reward's output goes to the run's standard error
                    env=without_credentials(os.environ),
                    pass_fds=(there.fileno(), lifeline_end),
                    start_new_session=True,  # an interrupt at the terminal is for the run alone
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
                whose(), "a reward process to start", f"{self.spec.name} in process {guard.pid}"
            ):
                async with asyncio.timeout(START_SECONDS):
                    answer = await _ask(worker, path, self.spec.reward)
        except TimeoutError:
            raise UserError(
                f"the reward {self.spec.name} did not start in its process within {START_SECONDS:g}"
                " seconds"
            ) from None
        finally:
            if answer is None or "error" in answer:
                self._end(worker)
        if answer is None:
            raise UserError(
                f"the process of the reward {self.spec.name} ended at its start:"
                f" {await self._exit_reason(worker)}"
            )
        if "error" in answer:
            raise UserError(
                f"the reward {self.spec.name} cannot be imported in a process of its own:"
                f" {answer['error']}"
            )
        if not answer["offline"] and not self._warned:
            self._warned = True
            LOG.warning(
                "rewards can reach the network: this machine does not allow a network namespace"
                " without it"
            )
        return worker

    def _end(self, worker: _Worker) -> None:
        """Kills the worker and everything that it started, without waiting."""
        if worker in self._all:
            self._all.discard(worker)
            worker.kill()
            self._ending = [guard for guard in self._ending if guard.poll() is None] + [
                worker.guard
            ]

    async def _exit_reason(self, worker: _Worker) -> str:
        with waiting(whose(), "its reward process to end", f"process {worker.guard.pid}"):
            code = await asyncio.to_thread(guarding.wait_until_ended, worker.guard)
        if code == -guarding.TOO_MANY:
            return (
                f"it had more than {self.spec.limits.processes} processes (reward_limits.processes)"
            )
        if code == -guarding.TOO_MUCH:
            return (
                f"its processes used more than {self.spec.limits.memory_gb:g} GB of memory"
                " (reward_limits.memory_gb)"
            )
        return (
            signal.Signals(code - 128).name
            if code - 128 in signal.valid_signals()
            else f"exit status {code}"
        )


def serialize_task(task: Task, text: str) -> bytes | Failed:
    """Returns what a worker reads of an episode, or why it cannot be sent there."""
    try:
        return bytes(cloudpickle.dumps((task, text)))
    except Exception as error:
        reason = worker_side.one_line(error)
        return Failed(f"task {task.id} cannot be sent to a reward process: {reason}")


class SpreadPool:
    """A pool of this process, and others like it on the hosts of a run."""

    def __init__(self, pool: RewardPool, hosts: Hosts) -> None:
        spec = pool.spec
        self._spread = Spread(pool, partial(RewardPool.of, spec), spec.workers, hosts, spec.name)

    async def score(self, task: Task, text: str) -> Outcome:
        """Scores a text where the fewest are scored. Raises: as RewardPool.score."""
        message = serialize_task(task, text)
        if isinstance(message, Failed):
            return message
        outcome: Outcome = await self._spread.call("score_message", task.id, message)
        return outcome

    async def close(self) -> None:
        """Ends all pools."""
        await self._spread.close()


async def _ask(worker: _Worker, *messages: bytes) -> dict[str, Any] | None:
    """Sends messages and reads one answer; None if the worker is gone."""
    try:
        for message in messages:
            worker.writer.write(len(message).to_bytes(worker_side.FRAME_BYTES, "big") + message)
        await worker.writer.drain()
        line = await worker.reader.readline()
    except (ConnectionError, ValueError):  # ValueError: longer than any valid answer
        return None
    if not line.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _serialize(function: Reward, name: str) -> bytes:
    """Serializes the function and its gin parameters for the worker, which reads no gin file: by
    name if it can be imported, else by value (from a notebook or script, or a partial)."""
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
    """Splits a gin configurable into the function that it wraps and its bound parameters; returns
    any other function as it is."""
    scope: list[str] = []
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if "scope_components" in closure:  # gin's wrapper for @scope/name
        function, scope = closure["fn_or_cls"], closure["scope_components"]
    try:
        with gin.config_scope("/".join(scope) or None):
            bound = gin.get_bindings(function)
    except (ValueError, TypeError):
        return function, {}
    wraps = getattr(function, "__globals__", {}).get("__name__") == gin.config.__name__
    return getattr(function, "__wrapped__", function) if wraps else function, dict(bound)
