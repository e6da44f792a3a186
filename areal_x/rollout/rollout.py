"""The rollout on a thread of its own, so that generation goes on while the caller trains: the shell
around runner and engine.

The thread's event loop owns engine, workflow and runner; the caller's thread (a script's, or a
notebook's, where a loop may already run) sees only the blocking methods of `Rollout`. Ctrl-C
interrupts each of them and loses nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_x.errors import UserError
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episode import is_open_ended
from areal_x.rollout.runner import RolloutStats, Runner
from areal_x.run.journal import Resumed
from areal_x.runtime import background, timeline
from areal_x.runtime.interrupts import noted
from areal_x.runtime.loop import result, serve
from areal_x.runtime.waits import waiting
from areal_x.types import Episode, Group, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """Seconds that handing over a version took: copying the weights, and how long generation stood
    still for the swap (with rolling swaps: the longest that one server did). bytes: that were
    staged in files, 0 where none were."""

    staged_seconds: float
    paused_seconds: float
    bytes: int = 0


class Rollout:
    """Groups for the trainer, made while it trains. A context manager that leaves nothing behind.

        with Rollout(Runner(engine, workflow, TaskStream(tasks), TrajectoryQueue(16, 2), group_size=8)) as rollout:
            rollout.start()
            rollout.publish(trainer)          # nothing is admitted before the engine has the trainer's weights
            for _ in range(steps):
                groups = rollout.take()
                ...                           # one step of the trainer
                rollout.publish(trainer)

    runner: with a workflow that is already set up for the tokenizer. evaluation: what `evaluate`
    runs, by default the runner's workflow, greedily.
    """

    def __init__(self, runner: Runner, evaluation: Workflow | None = None) -> None:
        self.runner, self.engine = runner, runner.engine
        self.evaluation = evaluation or runner.workflow.greedy()
        self._workflows = [runner.workflow, *([evaluation] if evaluation else [])]  # to be closed
        self.resumed: Resumed | None = None  # where the first `swap` begins
        self._running: asyncio.Task[None] | None = None
        self._taking: Future[list[Group]] | None = None
        self._calls: set[Future[Any]] = set()
        self._failure: BaseException | None = None  # of what runs beside the calls
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, resumed: Resumed | None = None) -> None:
        """Starts the engine and returns when it is ready. resumed: where a run that ended goes on.

        Raises what the engine's start raises, with nothing left running.
        """
        if self._thread is not None:
            raise RuntimeError("this rollout was started before: make a new one")
        self.resumed = resumed
        loop = self._loop = asyncio.new_event_loop()
        background.watch(loop, self._failed)
        self._thread = background.thread(
            serve, loop, what="the rollout's thread", failed=self._failed, name="rollout"
        )
        try:
            with waiting("the run", "the engine to start"):
                self._call(self.engine.start())
        except BaseException:
            self.close()
            raise

    def publish(self, trainer: Trainer, version: int | None = None) -> Published:
        """Gives the engine the trainer's weights, while it generates but for the swap itself, and
        frees the slots of the groups that made them. The first call begins the rollout. version: of
        these weights, by default the trainer's."""
        version = trainer.version if version is None else version
        began = time.perf_counter()
        with (
            timeline.span("stage", version=version),
            waiting("the trainer", f"the weights of version {version} to be staged"),
        ):
            staged = self.engine.stage(trainer, version)
        staged_seconds = time.perf_counter() - began
        with waiting("the trainer", f"the engine to take version {version}"):
            paused_seconds = self._call(self.swap(staged, version))
        return Published(staged_seconds, paused_seconds, getattr(staged, "bytes", 0))

    def join(self, url: str) -> None:
        """A vLLM server that runs already takes part from now on. See VLLMEngine.join."""
        self._call(self._servers().join(url))

    def leave(self, url: str) -> None:
        """A vLLM server takes part no more. See VLLMEngine.leave."""
        self._call(self._servers().leave(url))

    def take(self) -> list[Group]:
        """The groups of the next step, in the order of consumption. Blocks until there are enough.

        Raises what ended the rollout: EngineError, or UserError when nothing can be scored. An
        interrupted call loses nothing: the next one returns the same groups.
        """
        runner = self.runner
        step, idle = runner.queue.step + 1, is_open_ended(runner.workflow)
        with noted(), waiting("the trainer", f"the groups of step {step}", runner.doing, idle=idle):
            if self._taking is None:
                self._taking = self._submit(self.runner.take())
            groups = self._result(self._taking)
        self._taking = None
        return groups

    def evaluate(self, tasks: Sequence[Task]) -> list[Episode]:
        """One episode a task under the weights that were published last, beside the rollout."""
        with waiting("the trainer", "the evaluation", self.runner.evaluating):
            return self._call(self.runner.evaluate(tasks, self.evaluation))

    def state(self) -> dict[str, Any]:
        """{"position", "next_ticket", "unfinished": [[ticket, position], …]}, and "workflow" where
        that has a state of its own: a `Resumed` of it goes on exactly here and runs again the
        groups that were admitted and not taken. For a checkpoint, between `publish` and `take`."""
        return self._look(self.runner.state)

    def stats(self) -> RolloutStats:
        """Counts since the start; also after `close`."""
        return self._look(self.runner.stats) if self._loop is not None else self.runner.stats()

    def close(self) -> None:
        """Ends the rollout, the workflow's processes and the engine. Safe to call twice and after a
        failed start."""
        if self._loop is None or self._thread is None:
            return
        with waiting("the run", "the rollout to end"):
            try:
                result(asyncio.run_coroutine_threadsafe(self.end(), self._loop))
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop = None

    async def swap(self, staged: Any, version: int) -> float:
        """What `publish` does on the rollout's loop: the seconds that generation stood still."""
        if self._running is not None:
            with waiting(
                "the publication",
                f"the groups that were admitted before version {version}",
                self.runner.doing,
            ):
                await self.runner.settled()
        paused = await self.engine.swap(staged)
        if self._running is None:
            self.runner.begin(version, self.resumed)
            # whoever takes is told
            self._running = background.start(
                self.runner.run(), "the rollout", failed=lambda _: None
            )
        else:
            self.runner.published(version)
        return paused

    async def end(self) -> None:
        """What `close` does on the rollout's loop."""
        # each is closed whatever becomes of the one before it
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.engine.close)
            for workflow in self._workflows:
                closing.push_async_callback(workflow.close)
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait([self._running])
                if not self._running.cancelled():
                    self._running.exception()  # whoever takes was told

    def _servers(self) -> Any:
        if not hasattr(self.engine, "join"):
            raise UserError("servers can join and leave with train.engine = 'vllm' alone")
        return self.engine

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            work.close()
            raise RuntimeError("this rollout does not run: call start() first, once")
        if self._failure is not None:
            work.close()
            raise self._failure
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the rollout's loop and waits for it; an interrupt cancels it."""
        future = self._submit(work)
        try:
            return self._result(future)
        except BaseException:
            future.cancel()
            raise

    def _look(self, function: Callable[[], T]) -> T:
        """What the function returns on the rollout's loop."""
        with waiting("the trainer", "a turn of the rollout's loop"):
            return self._call(_now(function))

    def _result(self, future: Future[T]) -> T:
        try:
            return result(future)
        except CancelledError:
            if self._failure is None:
                raise
            raise self._failure from self._failure.__cause__

    def _failed(self, error: BaseException) -> None:
        """Something beside the calls ended with this: whatever is called, now or later, raises
        it."""
        self._failure = self._failure or error
        self.runner.fail(error)
        for future in list(self._calls):
            future.cancel()


async def _now(function: Callable[[], T]) -> T:
    return function()
