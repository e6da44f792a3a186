"""Weights in the embedded engine: the base and all adapters beside it at once, whole models one at a
time.

    adapters of the base ──▶ engine with the base and the adapters of all running requests
    a whole model ──▶ line   running requests end, then its weights are loaded

Requests for what is loaded join at once while nobody waits for other weights; a swap takes turns in
the order of arrival. An adapter comes with its first request, and running ones go on. So every token
of a request has the weights that it asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from areal_x.engines.embedded import EmbeddedEngine, StagedSnapshot
from areal_x.protocols.engine import Completion, Request
from areal_x.runtime import background
from areal_x.runtime.thread import OneThread
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import Shape, Source
from areal_x.tinker.sampling import Generate

DECODE_STEPS = 8  # after which a request of another client joins the sequences that run
MOST_ADAPTERS = 16  # in the engine, besides those whose requests run
BASE = ""  # the name of the base with its adapters, which no other weights have


@dataclass(eq=False)
class Adapter:
    """An adapter in the engine, or on its way there. users: its requests."""

    users: int = 0
    ready: asyncio.Future[None] | None = None


class EmbeddedWeights:
    """The engine, and the line before it. Used on one event loop."""

    def __init__(self, host: TrainerHost, thread: OneThread, slots: int) -> None:
        self.host = host
        self._thread = thread
        self._slots = slots
        self._engine: EmbeddedEngine | None = None
        self._loaded: str | None = None
        self._users = 0
        self._swap: asyncio.Task[None] | None = None
        self._swaps = 0
        self._line: deque[tuple[Source, str, asyncio.Future[None]]] = deque()
        # The adapters in the engine, the least recently used first, and their requests.
        self._adapters: dict[str, Adapter] = {}

    def check(self, shape: Shape) -> None:
        """Does nothing: models of all shapes are sampled."""

    @asynccontextmanager
    async def holding(self, source: Source) -> AsyncIterator[Generate]:
        """Gives what samples from these weights, which stay until the end."""
        at_once = await self._thread.run(self.host.samples_at_once, source)
        adapter = source.name if at_once and source.shape is not None else None
        async with self._holding(source, BASE if at_once else source.name) as engine:

            async def generate(requests: Sequence[Request]) -> Sequence[Completion]:
                own = [replace(x, adapter=adapter) for x in requests]
                found: Sequence[Completion] = await asyncio.gather(*engine.submit(own))
                return found

            if adapter is None:
                yield generate
                return
            held = self._adapters[adapter] = self._adapters.pop(adapter, Adapter())
            held.users += 1
            try:
                if held.ready is None:
                    held.ready = asyncio.get_running_loop().create_future()
                    background.start(self._put(engine, source, held.ready), "an adapter")
                await asyncio.shield(held.ready)
                yield generate
            finally:
                held.users -= 1

    async def _put(
        self, engine: EmbeddedEngine, source: Source, ready: asyncio.Future[None]
    ) -> None:
        """Brings an adapter into the engine, in place of some that nobody uses."""
        try:
            idle = [name for name, x in self._adapters.items() if not x.users]
            gone = idle[: max(len(idle) - MOST_ADAPTERS, 0)]
            for name in gone:  # before anything waits: adapters come at the same time
                del self._adapters[name]
            await asyncio.gather(*(engine.put_adapter(name, None) for name in gone))
            given = await self._thread.run(self.host.adapter, source)
            await engine.put_adapter(source.name, given)
        except Exception as failure:
            self._adapters.pop(source.name, None)
            ready.set_exception(failure)
        else:
            ready.set_result(None)

    @asynccontextmanager
    async def _holding(self, source: Source, key: str) -> AsyncIterator[EmbeddedEngine]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((source, key, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # it was admitted meanwhile
            raise
        try:
            assert self._engine is not None
            yield self._engine
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        self._admit()

    def _admit(self) -> None:
        """Admits whoever is first in the line, as long as the weights are theirs."""
        while self._line and self._swap is None:
            source, key, turn = self._line[0]
            if turn.done():  # cancelled
                self._line.popleft()
            elif key == self._loaded:
                self._line.popleft()
                self._users += 1
                turn.set_result(None)
            elif self._users == 0:
                self._swap = background.start(self._load(source, key), "a swap of weights")
            else:
                return

    async def _load(self, source: Source, key: str) -> None:
        error: Exception | None = None
        try:
            if self._engine is None:
                sampler = await self._thread.run(self.host.sampler, self._slots)
                engine = EmbeddedEngine(sampler, DECODE_STEPS)
                await engine.start()
                self._engine = engine
            snapshot = await self._thread.run(self.host.snapshot, source)
            self._swaps += 1
            await self._engine.swap(StagedSnapshot(snapshot=snapshot, version=self._swaps))
            self._loaded = key
        except Exception as failure:
            error = failure
        self._swap = None
        if error is not None:
            *_, turn = self._line.popleft()
            if not turn.done():
                turn.set_exception(error)
        self._admit()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
