"""Requests of several models that go through the trainer together.

    client A  ─ datums ──┐
    client B  ─ datums ──┼─▶ a pass of at most so many tokens, in equal shares ─▶ next pass
    client C  ─ datums ──┘

A request longer than its share goes on in the next pass, so that a client that sends much does not
hold up the others. Clients come back at about the same time after a pass, so the next one waits for
those of the last two, a quarter of a pass at most; a request alone waits for nobody.

If everything is to be exact (`TrainerHost.exact`), they take turns instead, a pass each. So do
requests that a restarted server computes again: most clients had trained alone, and others' requests
in a pass change the last bits of one's gradients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_x.runtime import background
from areal_x.runtime.thread import OneThread
from areal_x.tinker.host import TrainerHost, Work
from areal_x.tinker.losses import Evaluated
from areal_x.tinker.models import Model

WAIT_SHARE = 0.25  # of the last pass
MOST_WAIT = 0.05  # seconds


@dataclass(eq=False)
class Waiting:
    """A request. owner: the client whose share it takes. apart: whether its passes are its own."""

    owner: str
    work: Work
    apart: bool
    done: asyncio.Future[None]


@dataclass(eq=False)
class Gathering:
    """The requests that wait for the trainer, the oldest first. Used on one event loop."""

    host: TrainerHost
    thread: OneThread
    passes: int = 0
    _waiting: list[Waiting] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _last: tuple[frozenset[Model], frozenset[Model]] = (frozenset(), frozenset())
    _until: float = 0.0  # when the wait for them ends, by time.monotonic

    async def forward(
        self, owner: str, work: Work, apart: bool = False
    ) -> tuple[list[np.ndarray], Evaluated]:
        """Computes a request: see `TrainerHost.forward`. apart: in passes of its own. Raises:
        UserError."""
        at_once = self.host.is_at_once(work.model)
        if at_once is None:
            at_once = await self.thread.run(self.host.trains_at_once, work.model)
        if not at_once:
            given = work.model, work.datums, work.loss, work.config, work.backward
            return await self.thread.run(self.host.forward, *given)
        apart = apart or self.host.exact == "everything"
        waiting = Waiting(owner, work, apart, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        if self._task is None:
            self._task = background.start(self._run(), "the passes of several models")
        try:
            await waiting.done
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        if work.error is not None:
            raise work.error
        return work.logprobs, work.found

    async def _run(self) -> None:
        try:
            while self._waiting:
                apart = self._waiting[0].apart
                if not apart:
                    await self._gather()
                together = [x for x in self._waiting if not x.apart]
                chosen = self._waiting[:1] if apart else together
                portions = shares([(x.owner, x.work) for x in chosen], self.host.pass_tokens)
                begun = time.monotonic()
                await self.thread.run(self.host.advance, portions)
                now = time.monotonic()
                self.passes += 1
                self._until = now + min(WAIT_SHARE * (now - begun), MOST_WAIT)
                self._last = frozenset(work.model for work, _ in portions), self._last[0]
                for own in chosen:
                    there = own in self._waiting  # not cancelled
                    if there and (own.work.done or apart):
                        self._waiting.remove(own)
                    if own.work.done and not own.done.done():
                        own.done.set_result(None)
                    elif there and apart:
                        self._waiting.append(own)  # behind those that it kept waiting
                # The clients' next requests come before the next pass begins.
                await asyncio.sleep(0)
        finally:
            self._task = None

    async def _gather(self) -> None:
        """Waits for the models of the last two passes, for a while."""
        expected = self._last[0] | self._last[1]
        while not expected <= {x.work.model for x in self._waiting}:
            left = self._until - time.monotonic()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return


def shares(waiting: Sequence[tuple[str, Work]], tokens: int) -> list[tuple[Work, int]]:
    """Returns which requests go through the next pass, and with how many tokens: owners have equal
    shares of them, and an owner's requests equal shares of its own. What some leave is for the others,
    the oldest first; whoever waits has a datum in the pass."""
    sizes = {id(work): work.tokens_left for _, work in waiting}
    given = dict.fromkeys(sizes, 0)
    left = tokens
    while left > 0:
        hungry = [(owner, work) for owner, work in waiting if given[id(work)] < sizes[id(work)]]
        owners = dict.fromkeys(owner for owner, _ in hungry)
        if not owners:
            break
        for owner in owners:
            own = [work for of, work in hungry if of == owner]
            each = max(left // (len(owners) * len(own)), 1)
            for work in own:
                given[id(work)] += min(each, sizes[id(work)] - given[id(work)])
        left = tokens - sum(given.values())
    return [(work, given[id(work)]) for _, work in waiting]
