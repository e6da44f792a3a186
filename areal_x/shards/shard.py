"""One shard of the rollout, in a process of its own: an engine over a part of the servers, the
workflow, and the event loop that they share.

    driver                            this process
    give(groups) ─────────────────▶   LocalEpisodes ──▶ workflow ──▶ engine ──▶ its servers
    news() ◀── finished groups ────       │
    swap(files) ──────────────────────────────────────────────────▶ engine
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_x.protocols.engine import Engine, EngineError
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episode import first_of
from areal_x.rollout.episodes import EpisodeSettings, LocalEpisodes
from areal_x.runtime import background, timeline
from areal_x.runtime.loop import collect, new_loop, serve
from areal_x.shards.messages import Finished, News, Opened
from areal_x.types import Episode, Group, Task

T = TypeVar("T")

GATHER_SECONDS = 0.05  # in which news are collected: each message costs the driver about 0.3 ms
NEWS_SECONDS = 2.0  # after which a shard reports its state though nothing has happened
# Share of the concurrency by which the wanted slots change until the driver is told.
CHANGE = 1 / 16


@dataclass(frozen=True)
class ShardParts:
    """What a shard consists of; neither the engine nor its servers are started yet."""

    engine: Engine

    workflow: Workflow
    """Set up."""

    evaluation: Workflow
    """The one that answers held-out tasks, set up."""

    closing: ExitStack = field(default_factory=ExitStack)
    """Closed last; may wait."""


MakeParts = Callable[[int, int, Callable[[str], None]], ShardParts]
"""Makes the parts of a shard in its process: of this number, opened for this time, with a function
that shows a sentence to the user. Travels there."""


class Shard:
    """The object in a shard's process. Its methods may be called from any thread, and at the same
    time."""

    def __init__(self, make: MakeParts, settings: EpisodeSettings) -> None:
        self._make, self._settings = make, settings
        self._finished: list[Finished] = []
        self._messages: list[str] = []
        self._metrics: dict[str, float] = {}
        self._lost = self._mistake = ""
        self._received = self._reported = 0
        self._running: dict[int, asyncio.Task[None]] = {}  # in the order of admission
        self._loop = new_loop()
        self._happened = asyncio.Event()
        background.watch(self._loop, self._failed)
        background.thread(
            serve, self._loop, what="the shard's thread", failed=self._failed, name="shard"
        )

    def open(self, number: int, times: int) -> Opened:
        """Starts the engine. number: of the shard. times: how often a shard of this number was
        opened before.

        Raises: whatever the engine's start raises.
        """
        return self._run(self._open(number, times))

    def swap(self, staged: Any) -> float:
        """Makes weights current that the driver has staged. Returns the seconds that generation was
        paused."""

        async def swapped() -> float:
            collect()
            return await self._parts.engine.swap(staged)

        return self._run(swapped())

    def give(self, groups: Sequence[Group]) -> None:
        """Begins the episodes of groups."""
        self._loop.call_soon_threadsafe(self._give, groups)

    def news(self) -> News:
        """Returns as soon as something has happened, and at the latest after NEWS_SECONDS."""
        return self._run(self._news())

    def evaluate(self, tasks: Sequence[tuple[int, Task]]) -> list[Episode] | None:
        """Returns an answer to each of an evaluation's tasks, which come with their indices; None if
        the engine was lost."""
        return self._run(self._evaluate(tasks))

    def balance(self, trainer_idle: float, rollout_idle: float) -> None:
        """See Engine.balance; its metrics come with the news."""

        async def balanced() -> None:
            self._metrics = self._parts.engine.balance(trainer_idle, rollout_idle)

        self._run(balanced())

    def join(self, url: str) -> None:
        """See Engine.join."""
        self._run(self._parts.engine.join(url))

    def leave(self, url: str) -> None:
        """See Engine.leave."""
        self._run(self._parts.engine.leave(url))

    def spans(self) -> list[timeline.Interval]:
        """Returns the spans that have ended since the last time, in seconds since the epoch."""
        recorder, here = self._recorder, time.time() - time.perf_counter()
        return [interval.shifted(here) for interval in recorder.take()]

    def close(self) -> None:
        """Ends the episodes, the workflow's processes and the engine with its servers."""
        self._run(self._close())

    # ---- on the loop

    async def _open(self, number: int, times: int) -> Opened:
        self._parts = self._make(number, times, self._messages.append)
        self._recorder = timeline.begin()
        engine = self._parts.engine
        await engine.start()
        self._episodes = LocalEpisodes(
            engine, self._parts.workflow, self._settings, self._wanted_changed
        )
        return Opened(engine.concurrency, engine.context)

    async def _evaluate(self, tasks: Sequence[tuple[int, Task]]) -> list[Episode] | None:
        try:
            return await self._episodes.evaluate_some(tasks, self._parts.evaluation)
        except EngineError as error:
            self._lost = self._lost or f"{error}"
            self._happened.set()
            return None

    def _give(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._received += 1
            self._episodes.admit(group)
            # its error is told with the news
            self._running[group.ticket] = background.start(
                self._group(group), f"group {group.ticket}", failed=lambda _: None
            )

    async def _group(self, group: Group) -> None:
        try:
            done = await self._episodes.run(group)
        except BaseException as error:
            first = first_of(error)
            if isinstance(first, EngineError):
                self._lost = self._lost or f"{first}"
            elif isinstance(first, Exception):
                self._mistake = self._mistake or f"{background.described('an episode', first)}"
            raise
        else:
            self._finished.append(Finished(done.ticket, done.episodes, done.greedy_reward))
        finally:
            del self._running[group.ticket]
            self._episodes.ended()
            self._happened.set()

    def _wanted_changed(self) -> None:
        """Wakes `news` once the wanted slots have changed by more than a little."""
        changed = abs(self._episodes.wanted - self._reported)
        if changed > self._parts.engine.concurrency * CHANGE:
            self._happened.set()

    async def _news(self) -> News:
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_SECONDS):
                await self._happened.wait()
                await asyncio.sleep(GATHER_SECONDS)
        self._happened.clear()
        finished, self._finished = self._finished, []
        messages = self._messages.copy()
        del self._messages[: len(messages)]
        self._reported = self._episodes.wanted
        oldest = next(iter(self._running), None)
        return News(
            finished=finished,
            received=self._received,
            wanted=self._reported,
            concurrency=self._parts.engine.concurrency,
            counts=self._episodes.counts(),
            metrics=self._metrics,
            messages=messages,
            doing="" if oldest is None else self._episodes.doing(oldest),
            lost=self._lost,
            mistake=self._mistake,
        )

    async def _close(self) -> None:
        # each is closed even if closing another raises
        async with AsyncExitStack() as closing:
            closing.push_async_callback(asyncio.to_thread, self._parts.closing.close)
            closing.push_async_callback(self._parts.engine.close)
            for workflow in (self._parts.workflow, self._parts.evaluation):
                closing.push_async_callback(workflow.close)
            running = list(self._running.values())
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def _failed(self, error: BaseException) -> None:
        self._mistake = self._mistake or f"{error}"
        self._loop.call_soon_threadsafe(self._happened.set)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
