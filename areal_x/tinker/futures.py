"""Requests under way and their results, which clients come back for.

They are in memory, and what becomes of them is reported to an `Observer`, which keeps the journal. A
request's id is made of what it is about and its number, so that a request that is sent again finds
the first one's result: it is computed once. Results stay until newer ones need their room, since an
answer may be lost on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from areal_x.errors import UserError
from areal_x.runtime import background
from areal_x.tinker.results import Failure, Result

LOG = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Result]]
Outcome = Result | Failure

MOST_PENDING = 4096
MOST_KEPT = 10_000
MOST_DROPPED = 100_000  # ids of results that are gone
MOST_BYTES = 256 << 20  # of kept results
MOST_AHEAD = 4096  # numbers that a request may be ahead of its model's


class Full(Exception):
    """Too many requests are under way: send this one again later."""


class Unknown(Exception):
    """No request has this id."""


class Gone(Exception):
    """The result made room for newer ones."""


@dataclass(eq=False)
class Pending:
    """A request. kind: of its work, which a repetition has too."""

    id: str
    kind: str
    done: asyncio.Future[Outcome]
    task: asyncio.Task[None] | None = None


class Observer(Protocol):
    """Is notified of results, of those that made room, and of ids that are forgotten too."""

    def settled(self, id: str, kind: str, outcome: Outcome) -> None: ...

    def dropped(self, id: str) -> None: ...

    def forgotten(self, id: str) -> None: ...


@dataclass(eq=False)
class Futures:
    """The requests of one client."""

    observer: Observer
    limited: bool = True
    """False while requests of before a restart are added, whose number was limited then."""

    requests: dict[str, Pending] = field(default_factory=dict)  # the oldest first
    dropped: dict[str, None] = field(default_factory=dict)
    _bytes: int = 0
    _pending: int = 0
    _polls: set[asyncio.Future[None]] = field(default_factory=set)
    _ending: bool = False

    def add(self, id: str, kind: str) -> tuple[Pending, bool]:
        """Returns the request of an id, and True if it is new.

        Raises: Full; Gone; UserError if the id is of a request of another kind.
        """
        if id in self.requests:
            found = self.requests[id]
            if found.kind != kind:
                raise UserError(f"the number of this {kind} was that of a {found.kind}")
            return found, False
        if id in self.dropped:
            raise Gone
        if self.limited and self._pending >= MOST_PENDING:
            raise Full
        self._pending += 1
        made = Pending(id, kind, asyncio.get_running_loop().create_future())
        self.requests[id] = made
        return made, True

    def settle(self, request: Pending, outcome: Outcome) -> None:
        """Ends a request. The second outcome of one is ignored."""
        if request.done.done():
            return
        request.done.set_result(outcome)
        self._pending -= 1
        self._bytes += outcome.size
        self.observer.settled(request.id, request.kind, outcome)
        self._make_room()

    def restore(self, id: str, kind: str, outcome: Outcome | None) -> None:
        """Adds the request of an earlier process, with its result: None if that made room."""
        if outcome is None:
            self.dropped[id] = None
            return
        made = Pending(id, kind, asyncio.get_running_loop().create_future())
        made.done.set_result(outcome)
        self.requests[id] = made
        self._bytes += outcome.size

    def _make_room(self) -> None:
        ended = len(self.requests) - self._pending
        if ended <= MOST_KEPT and self._bytes <= MOST_BYTES:
            return
        for id in [id for id, x in self.requests.items() if x.done.done()][:-1]:
            self._bytes -= self.requests.pop(id).done.result().size
            self.dropped[id] = None
            self.observer.dropped(id)
            ended -= 1
            if ended <= MOST_KEPT and self._bytes <= MOST_BYTES:
                break
        while len(self.dropped) > MOST_DROPPED:
            oldest = next(iter(self.dropped))
            del self.dropped[oldest]
            self.observer.forgotten(oldest)

    async def result(self, id: str, seconds: float) -> Outcome | None:
        """Returns a request's outcome, None if it takes longer or `end_polls` was called.

        Raises: Unknown; Gone.
        """
        if id not in self.requests:
            raise Gone if id in self.dropped else Unknown
        done = self.requests[id].done
        poll = asyncio.get_running_loop().create_future()
        self._polls.add(poll)
        if self._ending:
            poll.set_result(None)
        try:
            await asyncio.wait({done, poll}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._polls.discard(poll)
        return done.result() if done.done() else None

    def end_polls(self) -> None:
        """Lets all who wait for a result go without, and those who ask later."""
        self._ending = True
        for poll in self._polls:
            if not poll.done():
                poll.set_result(None)

    def start(self, id: str, kind: str, work: Work) -> bool:
        """Starts a request's work and returns True, unless it was sent before. Raises: as `add`."""
        request, new = self.add(id, kind)
        if new:
            request.task = background.start(self.run(request, work), f"the {kind}")
        return new

    async def run(self, request: Pending, work: Work) -> None:
        """Does a request's work and settles it, whatever comes of it."""
        if request.done.done():  # cancelled before
            return
        outcome: Outcome
        try:
            outcome = await work()
        except UserError as error:
            outcome = Failure(str(error), "user")
        except asyncio.CancelledError:  # by `cancel`, or the server ends and goes on later
            raise
        except Exception as error:
            LOG.exception("a %s failed", request.kind)
            outcome = Failure(f"{type(error).__name__}: {error}", "server")
        self.settle(request, outcome)

    def cancel(self, id: str) -> None:
        """Ends the work of a request that `start` started; others run on."""
        request = self.requests.get(id)
        if request is not None and request.task is not None:
            request.task.cancel()
            self.settle(request, Failure("the request was cancelled", "user"))


@dataclass(eq=False)
class Line:
    """The requests of one model, which run one after the other in the order of their numbers, in
    whatever order they arrive."""

    futures: Futures
    next: int = 0
    arrived: dict[int, tuple[Pending | None, Work | None]] = field(default_factory=dict)
    """By number; without a request, work of before a restart that is done again for its effect on
    the model, or None if it had none."""

    after: Callable[[int], Awaitable[None]] | None = None
    """Called with a request's number after its result, before the next one begins."""

    task: asyncio.Task[None] | None = None

    def put(self, id: str, number: int, kind: str, work: Work) -> bool:
        """Returns True for a new request.

        Raises: as `Futures.add`; UserError for a number far ahead of the others.
        """
        if self.futures.limited and number > self.next + MOST_AHEAD:
            raise UserError(f"the request has the number {number}, and {self.next} is missing")
        request, new = self.futures.add(id, kind)
        if not new:
            return False
        if number < self.next:
            self.futures.settle(request, Failure("its number is that of an earlier one", "user"))
            return False
        self.arrived[number] = request, work
        self._start()
        return True

    def repeat(self, number: int, work: Work | None) -> None:
        """Puts work of before a restart in its place."""
        self.arrived[number] = None, work
        self._start()

    def _start(self) -> None:
        if self.task is None:
            self.task = background.start(self._run(), "a model's requests")

    async def _run(self) -> None:
        try:
            while self.next in self.arrived:
                request, work = self.arrived.pop(self.next)
                self.next += 1
                if work is None:
                    continue
                if request is not None:
                    await self.futures.run(request, work)
                else:
                    await again(work)
                if self.after is not None:
                    await self.after(self.next - 1)
        finally:
            self.task = None

    def close(self) -> None:
        """Fails what has not begun."""
        for request, _ in self.arrived.values():
            if request is not None:
                self.futures.settle(request, Failure("the model was unloaded", "user"))
        self.arrived.clear()


async def again(work: Work) -> None:
    """Does work whose result is known, for its effect."""
    try:
        await work()
    except UserError:
        pass  # as at the first time
    except Exception:
        LOG.exception("a request could not be repeated after a restart")
