"""Pacing: when groups are admitted and when requests reach the engine, either immediately or in
waves that depend on counts alone.

A floating-point sum depends on which requests share a decoding step and in which slots, and a token
on the weights that are current when it is sampled. A run that is repeatable to the last bit
therefore fixes both: every group admitted under a version is generated under that version, and a
wave of requests enters the engine only once all of its requests are known.

    take ──▶ admit all free slots ──▶ every live episode waits ──▶ a wave, sorted by key ──▶ engine ──┐
                                               ▲                                                      │
    publish ◀── all admitted groups finished ──┴──────── tools, rewards, the next call ◀──────────────┘
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, Engine, Request

# Share of the engine's concurrency by which more requests are admitted, so that no slot idles when
# a request ends.
LOOK_AHEAD = 1 / 8
Key = tuple[int, ...]  # (seed, training or evaluation, ticket, episode, call)


class Pacing(Protocol):
    """Decides when groups are admitted and when requests reach the engine."""

    engine: Engine
    between_publications: bool
    """True if all groups admitted under a version must finish before the next version is
    published."""

    def has_room(self, wanted: int) -> bool:
        """True if another group may be admitted. wanted: engine slots that episodes in flight hold
        or wait for."""
        ...

    def places(self, tasks: int) -> int:
        """Returns how many of `tasks` evaluation episodes may be in flight at once."""
        ...

    def open(self) -> None:
        """Called when the trainer waits for the next step's groups."""
        ...

    def close(self) -> None:
        """Called when a version was published."""
        ...

    def began(self, episodes: int) -> None:
        """Called when this many more episodes are live."""
        ...

    def ended(self) -> None:
        """Called when an episode is over; for the last episode of a group, once the group is
        finished or dropped."""
        ...

    async def generate(self, key: Key, request: Request) -> Completion: ...

    def release(self) -> None:
        """Sends the next wave to the engine if it is complete. Called when nothing more can be
        admitted."""
        ...


class ImmediatePacing:
    """Sends requests to the engine when they are made and admits groups while the engine has room.
    Admitting no earlier keeps every group as fresh as possible."""

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

    Nothing is admitted between a publication and the next `take`, so that an evaluation has the
    engine to itself and a checkpoint contains no half-generated group. A time limit is a clock: an
    episode that reaches its own makes the run non-deterministic.

    engine: its `submit` takes the requests of a wave. changed: called when a wave may be complete.
    """

    between_publications = True

    def __init__(self, engine: Engine, changed: Callable[[], None]) -> None:
        self.engine = engine
        self._changed = changed
        self._open = False
        # episodes that are not waiting for the engine, and groups that are being finished
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
        """Raises: UserError for two concurrent calls by one episode, whose order would depend on a
        clock."""
        episode = key[:-1]
        if any(other[:-1] == episode for other in (*self._waiting, *self._in_flight)):
            raise UserError(
                "train.deterministic = True cannot order concurrent calls by one episode: let the"
                " workflow await one call before it makes the next, or set it to False"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[key] = request, future
        self.ended()  # inactive while it waits
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
        submitted = self.engine.submit([request for _, (request, _) in wave])
        for (key, (_, future)), sent in zip(wave, submitted, strict=True):
            self._in_flight[key] = sent
            sent.add_done_callback(partial(self._deliver, key, future))

    def _deliver(
        self, key: Key, future: asyncio.Future[Completion], done: asyncio.Future[Completion]
    ) -> None:
        del self._in_flight[key]
        self.began(1)
        if future.done() or done.cancelled():  # the episode was cancelled
            return
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
