"""Episodes that wait for workers on other machines, and those that workers have: each is answered
once, by one of them.

    offered ──take──▶ leased ──answer──▶ answered
       ▲                │ no sign of life for lease_seconds, or given back
       └────────────────┘ its session is closed; the next worker gets another one

Everything belongs to the gateway's event loop. Knows no socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from areal_x.agents.calling import AgentResult
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.work import Assignment, WorkAnswer, WorkOver
from areal_x.errors import printable
from areal_x.runtime.waits import waiting, whose

LEASE_SECONDS = 30.0


class WorkerLost(Exception):
    """A worker that stopped showing signs of life, or gave its episode back. died: the former."""

    def __init__(self, message: str, died: bool) -> None:
        super().__init__(message)
        self.died = died


class AgentFailed(Exception):
    """What went wrong in an agent on another machine, in its worker's words."""


@dataclass(eq=False)
class Offer:
    """An episode that waits for a worker. task: as JSON. open: opens its session. taken: resolves
    to its lease."""

    task: bytes
    open: Callable[[], Awaitable[GatewaySession]]
    taken: asyncio.Future[Lease]


@dataclass(eq=False)
class Lease:
    """An episode that a worker has. until: time on the loop's clock at which it is lost, unless the
    worker shows a sign of life before. answered: resolves to its answer, or fails."""

    session: GatewaySession
    worker: str
    until: float
    answered: asyncio.Future[WorkAnswer]


@dataclass
class Board:
    """See above. lease_seconds: longest silence of a worker that has an episode."""

    lease_seconds: float = LEASE_SECONDS
    is_over: bool = False
    _offers: deque[Offer] = field(default_factory=deque)
    _leases: dict[str, Lease] = field(default_factory=dict)  # by the ids of their sessions
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # ---- the run's side

    async def lease_for(
        self,
        task: bytes,
        open_session: Callable[[], Awaitable[GatewaySession]],
        first: bool = False,
    ) -> Lease:
        """Offers an episode and waits, without limit, for a worker to take it. Whoever receives the
        lease must close it with `end`. first: before all others."""
        offer = Offer(task, open_session, asyncio.get_running_loop().create_future())
        self._put(offer, first)
        try:
            with waiting(whose(), "a worker to take it", idle=True):
                return await offer.taken
        except asyncio.CancelledError:
            if offer.taken.done() and not offer.taken.cancelled():
                self.end(offer.taken.result())
            raise
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    async def answer_to(self, session: GatewaySession) -> WorkAnswer:
        """Waits for the worker's answer. Raises: WorkerLost."""
        lease = self._leases[session.id]
        loop = asyncio.get_running_loop()
        while not lease.answered.done():
            if (left := lease.until - loop.time()) <= 0:
                raise WorkerLost(
                    f"the worker {lease.worker} has shown no sign of life for"
                    f" {self.lease_seconds:g} s",
                    died=True,
                )
            await asyncio.wait({lease.answered}, timeout=left)
        return lease.answered.result()

    def end(self, lease: Lease) -> None:
        """Closes an episode's lease and session: whatever its worker still sends changes
        nothing."""
        self._leases.pop(lease.session.id, None)
        lease.session.close()
        if not lease.answered.cancel() and not lease.answered.cancelled():
            lease.answered.exception()  # retrieved, whether or not anybody waited for it

    def close(self) -> None:
        """Tells workers that no more episodes will come."""
        self.is_over = True
        self._changed.set()

    # ---- the workers' side

    async def take(self, worker: str, seconds: float) -> Assignment | None:
        """Waits so many seconds for an episode; None if there was none. Raises: WorkOver once the
        run ends."""
        try:
            async with asyncio.timeout(seconds):
                with waiting("the gateway", "an episode for a worker", idle=True):
                    while not self._offers and not self.is_over:
                        self._changed.clear()
                        await self._changed.wait()
        except TimeoutError:
            return None
        if self.is_over:
            raise WorkOver
        return await self._lease(self._offers.popleft(), worker)

    def renew(self, ids: Sequence[str]) -> list[str]:
        """Records a sign of life; returns those of these leases that are lost."""
        until = asyncio.get_running_loop().time() + self.lease_seconds
        for id in ids:
            if id in self._leases:
                self._leases[id].until = until
        return [id for id in ids if id not in self._leases]

    def answer(self, id: str, answer: WorkAnswer) -> bool:
        """Records the answer of a lease; False if it has one, or is lost."""
        lease = self._leases.get(id)
        if lease is None or lease.answered.done():
            return False
        lease.answered.set_result(answer)
        return True

    def give_back(self, id: str) -> bool:
        """Frees an episode for the next worker; False if the lease has an answer, or is lost."""
        lease = self._leases.get(id)
        if lease is None or lease.answered.done():
            return False
        lease.answered.set_exception(
            WorkerLost(f"the worker {lease.worker} gave it back", died=False)
        )
        return True

    def _put(self, offer: Offer, first: bool = False) -> None:
        (self._offers.appendleft if first else self._offers.append)(offer)
        self._changed.set()

    async def _lease(self, offer: Offer, worker: str) -> Assignment | None:
        try:
            session = await offer.open()
        except BaseException:  # the worker has disconnected, or the gateway cannot open sessions
            if not offer.taken.done():
                self._put(offer, first=True)
            raise
        if offer.taken.done():  # the episode was cancelled meanwhile
            session.close()
            return None
        loop = asyncio.get_running_loop()
        until = loop.time() + self.lease_seconds
        lease = Lease(session, printable(worker), until, loop.create_future())
        self._leases[session.id] = lease
        offer.taken.set_result(lease)
        return Assignment(session.id, session.key, offer.task, self.lease_seconds)


def result_of(answer: WorkAnswer, session: GatewaySession) -> AgentResult:
    """Returns what the agent returned. Raises: AgentFailed with its error."""
    if answer.error is not None:
        raise AgentFailed(printable(answer.error))
    if answer.printed is not None:
        return None if session.state.rewards else answer.printed
    return answer.result
