"""The slots of requests in flight, where there are fewer than requests because this process may not
have as many connections."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from weakref import WeakKeyDictionary

from areal_x.runtime import open_files


class RequestSlots:
    """Slots for `limit` requests, to any server.

    A slot that becomes free goes to the request that has waited longest, or to one of the server
    whose connection became free with it, if fewer than `limit` requests came in between: to open
    another connection costs as much as the request (benchmarks/dispatch.py --limit). So a request is
    overtaken by fewer than `limit` others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._numbers = itertools.count()
        # the requests that wait, the oldest first: their servers
        self._waiting: OrderedDict[int, tuple[str, asyncio.Future[None]]] = OrderedDict()
        self._of_server: dict[str, deque[int]] = {}

    def of(self, server: str) -> Slot:
        """Returns an asynchronous context manager that holds a slot for a request to this server."""
        return Slot(self, server)

    async def acquire(self, server: str) -> None:
        if self._free:
            self._free -= 1
            return
        number = next(self._numbers)
        granted = asyncio.get_running_loop().create_future()
        self._waiting[number] = server, granted
        self._of_server.setdefault(server, deque()).append(number)
        try:
            await granted
        except asyncio.CancelledError:
            if number in self._waiting:
                self._remove(number)
            elif not granted.cancelled():  # it has the slot
                self.release(server)
            raise

    def release(self, server: str) -> None:
        """server: of the request that has ended."""
        while self._waiting:
            oldest = next(iter(self._waiting))
            own = self._of_server.get(server)
            granted = self._remove(own[0] if own and own[0] - oldest < self._limit else oldest)
            if not granted.done():  # else it was cancelled, and its request does not know yet
                granted.set_result(None)
                return
        self._free += 1

    def _remove(self, number: int) -> asyncio.Future[None]:
        server, granted = self._waiting.pop(number)
        numbers = self._of_server[server]
        numbers.remove(number)
        if not numbers:
            del self._of_server[server]
        return granted


class Slot:
    """A slot for one request."""

    __slots__ = ("_server", "_slots")

    def __init__(self, slots: RequestSlots, server: str) -> None:
        self._slots, self._server = slots, server

    async def __aenter__(self) -> None:
        await self._slots.acquire(self._server)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release(self._server)


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestSlots] = WeakKeyDictionary()


def request_slots() -> RequestSlots:
    """Returns the event loop's slots.

    Control requests (heartbeats, pauses, weights) take none: they must not wait for generation.
    """
    loop = asyncio.get_running_loop()
    if (slots := _of_loop.get(loop)) is None:
        slots = _of_loop[loop] = RequestSlots(open_files.connections())
    return slots
