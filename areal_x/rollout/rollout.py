"""The rollout on its own thread, so that generation goes on while the caller trains: the shell
around runner and engine.

The thread's event loop owns engine, workflow and runner. The caller's thread (of a script, or of a
notebook, where an event loop may already run) sees only the blocking methods of `Rollout`. Ctrl-C
interrupts each of them and loses nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from areal_x.protocols.trainer import RestsOnHost, Trainer
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.runner import RolloutStats, Runner
from areal_x.run.journal import Resumed
from areal_x.runtime import background, timeline
from areal_x.runtime.interrupts import deferred_interrupts
from areal_x.runtime.loop import collect, new_loop, result, serve
from areal_x.runtime.waits import waiting
from areal_x.types import Episode, Group, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """The cost of publishing one version."""

    staged_seconds: float
    """Seconds to copy the weights, while generation goes on."""
    paused_seconds: float
    """Seconds that generation was paused for the swap; with `vllm.waves`, the longest pause of any
    server."""
    bytes: int = 0
    """Bytes written to files; 0 if none were."""
    seconds: float = 0.0
    """Seconds from the beginning of staging until the engine has the weights."""


class Rollout:
    """Produces groups for the trainer while it trains. A context manager that leaves nothing
    behind.

        with Rollout(Runner(engine, workflow, TaskStream(tasks), TrajectoryQueue(16, 2), group_size=8)) as rollout:
            rollout.start()
            rollout.publish(trainer)          # nothing is admitted before the engine has the trainer's weights
            for _ in range(steps):
                groups = rollout.take()
                ...                           # one step of the trainer
                rollout.publish(trainer, wait=False)

    runner: its workflow is already set up for the tokenizer. evaluation: the workflow that
    `evaluate` runs, by default the runner's, greedily. models: what shares its accelerators with the
    engine; None if each side has its own. The two then take turns (docs/colocate.md): `take` ends the
    engine's, `publish` ends the trainer's, unless the next step's groups are there already. owned:
    further workflows that `evaluate` is called with, closed at the end.
    """

    def __init__(
        self,
        runner: Runner,
        evaluation: Workflow | None = None,
        models: RestsOnHost | None = None,
        owned: Sequence[Workflow] = (),
    ) -> None:
        self.runner, self.engine = runner, runner.engine
        self._models = models
        self._training = models is not None  # it is the trainer's turn
        self._turns: dict[str, float] = {}  # seconds of the last turn of the trainer
        self._slept = 0.0  # when the engine began to sleep
        # what was not published, as the trainer's turn goes on; None if nothing
        self._put_off: tuple[Trainer, int] | None = None
        self.evaluation = evaluation or runner.workflow.greedy()
        # to be closed
        self._workflows = [runner.workflow, *([evaluation] if evaluation else []), *owned]
        self.evaluates_only = False  # True admits no group; to be set before the first publication
        self.resumed: Resumed | None = None  # where the first `swap` begins
        self._running: asyncio.Task[None] | None = None
        self._swapping: asyncio.Task[Any] | None = None
        # the publication that nobody has waited for, with its version
        self._publication: tuple[int, Future[Published]] | None = None
        self._last = Published(0.0, 0.0)
        self._taking: Future[list[Group]] | None = None
        self._calls: set[Future[Any]] = set()
        self._failure: BaseException | None = None  # an error outside the calls
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, resumed: Resumed | None = None) -> None:
        """Starts the engine and returns when it is ready. resumed: where an earlier run stopped.

        Raises whatever the engine's start raises, with nothing left running.
        """
        if self._thread is not None:
            raise RuntimeError("this rollout was already started: make a new one")
        self.resumed = resumed
        loop = self._loop = new_loop()
        background.watch(loop, self._failed)
        self._thread = background.thread(
            serve, loop, what="the rollout's thread", failed=self._failed, name="rollout"
        )
        try:
            self._rest()
            with waiting("the run", "the engine to start"):
                self._call(self.engine.start())
        except BaseException:
            self.close()
            raise

    def publish(self, trainer: Trainer, version: int | None = None, wait: bool = True) -> Published:
        """Publishes the trainer's weights to the engine, which generates all the while except
        during the swap, and frees the slots of the groups that were trained on. The first call
        starts the rollout.

        version: of these weights, by default the trainer's. wait: False returns as soon as the
        weights are staged, so that the trainer goes on while the engine takes them; the result then
        has the pause, bytes and seconds of the publication before. There is one publication at a
        time: this waits for the one before, as `evaluate` does. If it fails, the next call of any
        method raises its error. Where the swap reads the trainer's own memory, this always waits.

        If engine and trainer take turns, and the groups of the next step are there, the engine
        would wake to sleep again: the version is left out unless this waits, or an evaluation
        needs it, and the trainer's turn goes on.
        """
        version = trainer.version if version is None else version
        self.finish_publication()
        if not wait and self._turn_goes_on():
            self._put_off = trainer, version
            before, self._last = self._last, Published(0.0, 0.0)
            return replace(before, staged_seconds=0.0)
        self._put_off = None
        self._trains()
        began = time.perf_counter()
        with (
            timeline.span("stage", version=version),
            waiting("the trainer", f"the weights of version {version} to be staged"),
        ):
            staged = self.engine.stage(trainer, version)
        staged_seconds = time.perf_counter() - began
        collect()
        self._rest()
        publication = self._submit(self._publish(staged, version, began, staged_seconds))
        self._publication = version, publication
        if wait or staged.reads_trainer:
            return self.finish_publication()
        publication.add_done_callback(self._published)
        return replace(self._last, staged_seconds=staged_seconds)

    def finish_publication(self) -> Published:
        """Waits for the publication that `publish` left under way, if there is one, and returns the
        last one's cost. Raises its error."""
        if self._publication is not None:
            (version, publication), self._publication = self._publication, None
            with waiting("the trainer", f"the engine to take version {version}"):
                self._last = self._wait_for(publication)
        return self._last

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        """Tells the engine how idle both sides were in a step (Engine.balance), and returns metrics of
        the step."""
        metrics = self._look(lambda: self.engine.balance(trainer_idle, rollout_idle))
        return {**metrics, **self._turns}

    def join(self, url: str) -> None:
        """Adds a running server to the engine. See Engine.join."""
        self._call(self.engine.join(url))

    def leave(self, url: str) -> None:
        """Removes a server from the engine. See Engine.leave."""
        self._call(self.engine.leave(url))

    def take(self) -> list[Group]:
        """Returns the groups of the next step, in the order of consumption. Blocks until there are
        enough.

        Raises what ended the rollout: EngineError, or UserError if nothing can be scored. An
        interrupted call loses nothing: the next one returns the same groups.
        """
        runner = self.runner
        step, idle = runner.queue.step + 1, runner.workflow.open_ended
        with (
            deferred_interrupts(),
            waiting("the trainer", f"the groups of step {step}", runner.doing, idle=idle),
        ):
            if self._taking is None:
                self._taking = self._submit(self.runner.take())
            groups = self._result(self._taking)
            self._trains()
        if self._put_off is not None:
            self._put_off, self._turns = None, {}  # the rest of the turn is another step's
        self._taking = None
        return groups

    def evaluate(self, tasks: Sequence[Task], workflow: Workflow | None = None) -> list[Episode]:
        """Runs one episode per task under the most recently published weights, beside the rollout.
        workflow: set up for the tokenizer, by default `evaluation`."""
        if self._put_off is not None:
            self.publish(*self._put_off)
        self.finish_publication()
        if returns := self._models is not None and self._training:
            self._rest()
            self._call(self._wake())
        with waiting("the trainer", "the evaluation", self.runner.evaluating):
            episodes = self._call(self.runner.evaluate(tasks, workflow or self.evaluation))
        if returns:
            self._trains()
        return episodes

    def state(self) -> dict[str, Any]:
        """Returns {"position", "next_ticket", "unfinished": [[ticket, position], …]}, and
        "workflow" if the workflow has state. A `Resumed` made from it continues exactly here and
        runs the groups again that were admitted but not taken. For a checkpoint, between `publish`
        and `take`."""
        return self._look(self.runner.state)

    def stats(self) -> RolloutStats:
        """Returns counts since the start; also after `close`."""
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

    # ---- turns of trainer and engine on the same accelerators

    def _trains(self) -> None:
        """Begins the trainer's turn: the engine sleeps, then the trainer's state returns to its
        devices."""
        if self._models is None or self._training:
            return
        self.finish_publication()
        began = time.perf_counter()
        with timeline.span("sleep"), waiting("the trainer", "the engine to sleep"):
            self._call(self._sleep())
        self._slept = time.perf_counter()
        with timeline.span("wake"), waiting("the trainer", "its state to return to its devices"):
            self._models.wake()
        self._training = True
        self._turns = {
            "sleep_seconds": self._slept - began,
            "wake_seconds": time.perf_counter() - self._slept,
        }

    def _turn_goes_on(self) -> bool:
        """True if it is the trainer's turn, and would be again at once after a publication."""
        turns = self._models is not None and self._training
        return turns and self._look(lambda: self.runner.queue.ready)

    def _rest(self) -> None:
        """Ends the trainer's turn: its state leaves its devices. The next swap wakes the engine."""
        if self._models is None or not self._training:
            return
        began = time.perf_counter()
        with timeline.span("rest"), waiting("the trainer", "its state to leave its devices"):
            self._models.rest()
        self._training = False
        ended = time.perf_counter()
        if self._slept:
            self._turns |= {"rest_seconds": ended - began, "asleep_seconds": ended - self._slept}

    async def _sleep(self) -> None:
        self.runner.limits.stop()
        await self.engine.sleep()

    async def _wake(self) -> None:
        await self.engine.wake()
        self.runner.limits.go_on()

    async def _publish(
        self, staged: Any, version: int, began: float, staged_seconds: float
    ) -> Published:
        paused = await self.swap(staged, version)
        return Published(staged_seconds, paused, staged.bytes, time.perf_counter() - began)

    def _published(self, publication: Future[Published]) -> None:
        """Ends the rollout if a publication failed: `take` would wait for its slots forever."""
        if not publication.cancelled() and (error := publication.exception()) is not None:
            self._failed(error)

    async def swap(self, staged: Any, version: int) -> float:
        """Does the part of `publish` that runs on the rollout's loop, and returns the seconds that
        generation was paused."""
        self._swapping = asyncio.current_task()
        try:
            if self._running is not None:
                with waiting(
                    "the publication",
                    f"the groups that were admitted before version {version}",
                    self.runner.doing,
                ):
                    await self.runner.settled()
            paused = await self.engine.swap(staged)
            self.runner.limits.go_on()
            if self.evaluates_only:
                return paused
            if self._running is None:
                self.runner.begin(version, self.resumed)
                # `take` raises its error
                self._running = background.start(
                    self.runner.run(), "the rollout", failed=lambda _: None
                )
            else:
                self.runner.published(version)
            return paused
        finally:
            self._swapping = None

    async def end(self) -> None:
        """Does the part of `close` that runs on the rollout's loop."""
        if self._swapping is not None:
            self._swapping.cancel()
            await asyncio.wait([self._swapping])
        # each is closed even if closing another raises
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.engine.close)
            for workflow in self._workflows:
                closing.push_async_callback(workflow.close)
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait([self._running])
                if not self._running.cancelled():
                    self._running.exception()  # `take` raises it

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            work.close()
            raise RuntimeError("this rollout is not running: call start() first, once")
        if self._failure is not None:
            work.close()
            raise self._failure
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the rollout's loop and waits for it; an interrupt cancels it."""
        return self._wait_for(self._submit(work))

    def _wait_for(self, future: Future[T]) -> T:
        try:
            return self._result(future)
        except BaseException:
            future.cancel()
            raise

    def _look(self, function: Callable[[], T]) -> T:
        """Calls the function on the rollout's loop and returns its result."""
        with waiting("the trainer", "an iteration of the rollout's loop"):
            return self._call(_now(function))

    def _result(self, future: Future[T]) -> T:
        try:
            return result(future)
        except CancelledError:
            if self._failure is None:
                raise
            raise self._failure from self._failure.__cause__

    def _failed(self, error: BaseException) -> None:
        """Ends the rollout after an error outside the calls: every call, now or later, raises
        it."""
        self._failure = self._failure or error
        self.runner.fail(error)
        for future in list(self._calls):
            future.cancel()


async def _now(function: Callable[[], T]) -> T:
    return function()
