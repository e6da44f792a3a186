"""When groups are admitted and when requests reach the engine: at once, or in waves that depend on
counts alone.

A floating-point sum depends on which requests share a decoding step and in which slots, and a token
on the weights that are current when it is sampled. So a run that is repeatable to the last bit
fixes both: everything that one version admits is generated under that version, and a wave of
requests enters the engine only when all of it is known.

    take ──▶ admit all free slots ──▶ every live episode waits ──▶ a wave, sorted by key ──▶ engine ──┐
                                               ▲                                                      │
    publish ◀── all admitted groups finished ──┴──────── tools, rewards, the next call ◀──────────────┘
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, Engine, Request

# of the engine's concurrency: requests that wait where one ends, so that no slot idles meanwhile
LOOK_AHEAD = 1 / 8
Key = tuple[int, ...]  # (seed, training or evaluation, ticket, episode, call)


class Pacing(Protocol):
    """between_publications: whether a version's groups must all be finished before the next version
    is published."""

    engine: Engine
    between_publications: bool

    def has_room(self, wanted: int) -> bool:
        """Whether another group may be admitted. wanted: places in the engine that episodes in
        flight hold or wait for."""
        ...

    def places(self, tasks: int) -> int:
        """How many of so many evaluation episodes may be in flight at once."""
        ...

    def open(self) -> None:
        """The trainer waits for the next step's groups."""
        ...

    def close(self) -> None:
        """A version was published."""
        ...

    def began(self, episodes: int) -> None:
        """So many episodes are live now."""
        ...

    def ended(self) -> None:
        """An episode, or the last one of a group together with what becomes of the group, is
        over."""
        ...

    async def generate(self, key: Key, request: Request) -> Completion: ...

    def release(self) -> None:
        """Sends the next wave to the engine if it is complete. Called when nothing more can be
        admitted."""
        ...


class ImmediatePacing:
    """Requests go to the engine when they are made, and groups are admitted as long as the engine
    has room: a group that is admitted no sooner than that is as fresh as can be."""

    between_publications = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def has_room(self, wanted: int) -> bool:
        return wanted < math.ceil(self.engine.concurrency * (1 + LOOK_AHEAD))

    def places(self, tasks: int) -> int:
        return self.engine.concurrency

    def open(self) -> None: ...

    def close(self) -> None: ...

    def began(self, episodes: int) -> None: ...

    def ended(self) -> None: ...

    async def generate(self, key: Key, request: Request) -> Completion:
        return await self.engine.generate(request)

    def release(self) -> None: ...


class WavePacing:
    """Admission, waves and publications as functions of counts: nothing here depends on how long
    anything takes.

    Between a publication and the next `take` nothing is admitted, so that an evaluation has the
    engine to itself and a checkpoint holds no group that is half generated. A time limit is a
    clock: an episode that reaches its own ends the promise.

    engine: its `submit` takes requests together, as the embedded engine's does. changed: called
    when a wave may be complete.
    """

    between_publications = True

    def __init__(self, engine: Any, changed: Callable[[], None]) -> None:
        self.engine = engine
        self._changed = changed
        self._open = False
        # episodes that compute something of their own, and groups that are being finished
        self._active = 0
        self._waiting: dict[Key, tuple[Request, asyncio.Future[Completion]]] = {}
        self._in_flight: dict[Key, asyncio.Future[Completion]] = {}

    def has_room(self, wanted: int) -> bool:
        return self._open

    def places(self, tasks: int) -> int:
        return max(tasks, 1)

    def open(self) -> None:
        self._open = True
        self._changed()

    def close(self) -> None:
        self._open = False

    def began(self, episodes: int) -> None:
        self._active += episodes

    def ended(self) -> None:
        self._active -= 1
        self._changed()

    async def generate(self, key: Key, request: Request) -> Completion:
        """Raises: UserError for two calls of one episode at the same time, whose order a clock
        would decide."""
        episode = key[:-1]
        if any(other[:-1] == episode for other in (*self._waiting, *self._in_flight)):
            raise UserError(
                "train.deterministic = True cannot order calls that an episode makes at the same"
                " time: let the workflow await one before it makes the next, or set it to False"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[key] = request, future
        self.ended()  # for as long as it waits
        try:
            return await future
        finally:
            if self._waiting.pop(key, None) is not None:  # cancelled before its wave
                self.began(1)
            elif (sent := self._in_flight.get(key)) is not None:  # cancelled meanwhile
                sent.cancel()

    def release(self) -> None:
        if self._active or self._in_flight or not self._waiting:
            return
        wave = sorted(self._waiting.items(), key=lambda item: item[0])
        self._waiting = {}
        for (key, (_, future)), sent in zip(
            wave, self.engine.submit([request for _, (request, _) in wave]), strict=True
        ):
            self._in_flight[key] = sent
            sent.add_done_callback(
                lambda done, key=key, future=future: self._deliver(key, done, future)
            )

    def _deliver(
        self, key: Key, done: asyncio.Future[Completion], future: asyncio.Future[Completion]
    ) -> None:
        del self._in_flight[key]
        self.began(1)
        if future.done() or done.cancelled():  # the episode was cancelled
            return
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
