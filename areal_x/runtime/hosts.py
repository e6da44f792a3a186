"""Services that run on any of several hosts: this process, and processes on other nodes of a cluster.

    driver                                               node
    Spread ──call("score", …)──▶ the least busy ───────▶ Services ─▶ the same service, on its own loop
                └──────────────▶ this process's own

A service is an object whose coroutines may run anywhere and may be run again elsewhere: the call of
a host that is lost is made on another.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from areal_x.runtime import background
from areal_x.runtime.loop import new_loop, serve
from areal_x.runtime.waits import waiting, whose


class Service(Protocol):
    """What is spread, besides the methods that are called. `close` is safe to call twice."""

    async def close(self) -> None: ...


class Host(Protocol):
    """Another node's `Services`, seen from this process."""

    @property
    def node(self) -> str:
        """The node's name, for messages."""
        ...

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Makes the node call a method of its Services. The future raises UserError if the method
        raises, and ConnectionError as soon as the host is gone."""
        ...


class Hosts(Protocol):
    """The hosts of a run, which come and go. Its methods may be called from any thread."""

    def there(self) -> Sequence[Host]:
        """Returns the hosts that are ready."""
        ...

    def lost(self, host: Host) -> None:
        """Removes a host that is gone. Safe to call twice."""
        ...


class Spread:
    """A service on every host. All methods belong to one event loop.

    own: the service in this process. make: makes it on another host, and travels there. calls: how
    many each of them runs at once; further calls wait in the order in which they came. about: of
    the service, for the message while they wait.
    """

    def __init__(
        self, own: Service, make: Callable[[], Service], calls: int, hosts: Hosts, about: str
    ) -> None:
        self._own, self._make, self._calls, self._hosts = own, make, calls, hosts
        self._about = about
        self._key = secrets.token_hex(8)
        self._running: dict[Host | None, int] = {}  # None is this process
        self._made: set[Host] = set()
        self._waiting: deque[asyncio.Future[Host | None]] = deque()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a coroutine of the service, run on the least busy host.

        Raises: what it raises here, UserError for what it raises on another host.
        """
        while True:
            host = await self._take()
            if host is None:
                try:
                    return await getattr(self._own, method)(*arguments)
                finally:
                    self._give_back(None)
            try:
                return await self._call(host, method, arguments)
            except ConnectionError:
                self._made.discard(host)
                self._hosts.lost(host)

    async def close(self) -> None:
        """Closes the service everywhere."""
        made, self._made = self._made, set()
        closing = [asyncio.wrap_future(host.call("close", self._key)) for host in made]
        with waiting("the rollout", "the services on other nodes to end", self._about):
            await asyncio.gather(*closing, return_exceptions=True)  # a host that is gone has ended
        await self._own.close()

    async def _call(self, host: Host, method: str, arguments: tuple[Any, ...]) -> Any:
        make = None if host in self._made else self._make
        try:
            calling = host.call("run", self._key, make, method, arguments)
        except BaseException:
            self._give_back(host)
            raise
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._give_back, host)

        # Not before the host has ended it: a call that is cancelled here goes on there.
        calling.add_done_callback(ended)
        answer = asyncio.wrap_future(calling)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        with waiting(whose(), "a call on another node", f"{self._about}, on {host.node}"):
            result = await asyncio.shield(answer)
        self._made.add(host)
        return result

    async def _take(self) -> Host | None:
        """Returns where the next call runs, and counts it; waits while every place is busy."""
        if not self._waiting and (free := self._free()):
            return self._count(free[0])
        turn: asyncio.Future[Host | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with waiting(whose(), "a free place on any node", self._about):
                return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise

    def _free(self) -> list[Host | None]:
        """Returns the places that can run another call, the least busy first; of equally busy ones
        another node first, as this one has the rest of the run to do."""
        places: list[Host | None] = [*self._hosts.there(), None]
        free = [place for place in places if self._running.get(place, 0) < self._calls]
        return sorted(free, key=lambda place: self._running.get(place, 0))

    def _count(self, place: Host | None) -> Host | None:
        self._running[place] = self._running.get(place, 0) + 1
        return place

    def _give_back(self, place: Host | None) -> None:
        left = self._running.pop(place) - 1
        if left:
            self._running[place] = left
        # A place is counted for the next one here, so that no later call can take it first.
        while self._waiting and (free := self._free()):
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(self._count(free[0]))


class Services:
    """The services of one node, in its process: each is made by its first call, and all live on one
    event loop. The methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop = new_loop()
        self._made: dict[str, Service] = {}
        background.watch(self._loop, self._failed)
        background.thread(
            serve, self._loop, what="the services' thread", failed=self._failed, name="services"
        )

    def run(
        self,
        key: str,
        make: Callable[[], Service] | None,
        method: str,
        arguments: tuple[Any, ...],
    ) -> Any:
        """Returns the result of a service's coroutine. make: needed by the first call of a key."""
        return self._result(self._run(key, make, method, arguments))

    def close(self, key: str) -> None:
        """Closes a service, if it was made."""
        self._result(self._close(key))

    async def _run(
        self,
        key: str,
        make: Callable[[], Service] | None,
        method: str,
        arguments: tuple[Any, ...],
    ) -> Any:
        if key not in self._made:
            assert make is not None
            self._made[key] = make()
        return await getattr(self._made[key], method)(*arguments)

    async def _close(self, key: str) -> None:
        if (service := self._made.pop(key, None)) is not None:
            await service.close()

    def _result(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _failed(self, error: BaseException) -> None:
        os._exit(1)  # so that its calls are made on another host
