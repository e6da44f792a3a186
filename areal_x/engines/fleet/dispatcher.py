"""The dispatcher sends each request to a server, and to another one if that is lost.

Every request that entered is answered, whichever servers are lost meanwhile: the tokens that a lost
server was generating are generated again elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet import slices
from areal_x.engines.fleet.client import MODEL
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.failures import ServerFailed, ServerLost, ServerRestarted
from areal_x.engines.fleet.named_adapters import NamedAdapters
from areal_x.engines.fleet.routing import REMEMBERED, Prefixes, prefixes_of
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.protocols.engine import Completion, EngineError, SamplingParams
from areal_x.runtime.waits import waiting, whose

ATTEMPTS = 10  # per request: if ten servers in a row fail at it, the fault is not theirs
# Share of the concurrency by which the load of a server that has the prompt's prefix in cache may
# exceed the least load.
SLACK = 1 / 8
# Requests after which young objects are collected. Python subtracts what is freed from what was made,
# so with thousands of requests in flight it waits for long and then stops for up to 60 ms.
COLLECTED = 128
PREFIXES_EACH = 16  # remembered for each request that may be in flight


@dataclass(order=True)
class WaitingRequest:
    """A request that no server has taken yet. Those that entered first are placed first."""

    request: int
    prefixes: Sequence[tuple[int, int]] = field(compare=False)
    server: asyncio.Future[str] = field(compare=False)


class Dispatcher:
    """Places requests on the supervisor's servers.

    experts: completions contain the experts of each token. named: the adapters that requests may
    name.
    """

    def __init__(
        self, config: FleetConfig, supervisor: Supervisor, experts: bool, named: NamedAdapters
    ) -> None:
        self.prefixes = Prefixes(max(REMEMBERED, PREFIXES_EACH * config.requests))
        self._config = config
        self._supervisor = supervisor
        self._fleet = supervisor.fleet
        self._experts = experts
        self._named = named
        self._requests = itertools.count()
        self._waiting: list[WaitingRequest] = []  # a heap
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Acts on a change of the fleet: places as many waiting requests as servers have room for,
        and wakes what waits for the change."""
        self._changed.set()
        while self._waiting:
            first = self._waiting[0]
            if not first.server.done():  # it was cancelled, if it is
                try:
                    server = self._route(first.request, first.prefixes)
                except EngineError as error:
                    first.server.set_exception(error)
                else:
                    if server is None:
                        return
                    first.server.set_result(server)
            heapq.heappop(self._waiting)

    async def change(self) -> None:
        """Waits until the fleet, or what it serves, may have changed."""
        self._changed.clear()
        await self._changed.wait()

    async def generate(
        self,
        tokens: Int32[np.ndarray, " P"],
        sampling: SamplingParams,
        model: str,
        stop: tuple[str, ...],
        features: dict[str, Any] | None,
        kept: bool,
        seed: int | None = None,
    ) -> Completion:
        """Generates on any server; another one starts over if that server is lost. Of a server
        that leaves, this returns the tokens so far, with the finish reason "abort". kept: a
        completion whose sampling truncates contains what it kept."""
        request = next(self._requests)
        if request % COLLECTED == 0:
            gc.collect(1)
        prefixes = prefixes_of(tokens)
        self._fleet.enter(request)
        try:
            for attempt in itertools.count(1):
                server = await self._place(request, prefixes)
                if not self._is_at(request, server):  # it was lost before this could go on
                    continue
                least = self._fleet.members[server].version
                replica = self._supervisor.replicas[server]
                request_it = partial(
                    replica.client.generate,
                    tokens,
                    sampling,
                    model=model,
                    experts=self._experts,
                    kept=kept,
                    stop=stop,
                    features=features,
                    **({} if seed is None else {"seed": seed}),
                )
                call = self._named.answer(replica, model, request_it)
                try:
                    completion = await self._supervisor.unless_lost(
                        call, partial(self._is_at, request, server)
                    )
                    if (
                        model == MODEL
                        and least is not None
                        and completion.versions.min(initial=least) < least
                    ):
                        raise ServerRestarted(
                            f"{server} generated with version {completion.versions.min()}, but was"
                            f" given version {least}"
                        )
                    handed_over = self._fleet.is_leaving(server) and slices.is_part(
                        completion, stop
                    )
                    if (
                        handed_over or completion.finish_reason != "abort"
                    ) and self._fleet.answered(request, server, time.monotonic()):
                        whole = np.concatenate([tokens, completion.tokens])
                        self.prefixes.remember(prefixes_of(whole, known=prefixes), server)
                        return completion
                    error: EngineError = ServerLost(f"{server} aborted a request that was wanted")
                except (ServerLost, ServerFailed) as raised:
                    error = raised
                except EngineError as raised:
                    raise replica.explained(raised) from raised
                self._failed(request, server, error, attempt)
            raise AssertionError("unreachable")
        finally:
            self._fleet.withdraw(request)
            self.notify()

    def _failed(self, request: int, server: str, error: EngineError, attempt: int) -> None:
        """Raises EngineError if another attempt would not help."""
        replica = self._supervisor.replicas.get(server)
        if self._config.direct and replica is not None:
            lost = (
                f"{replica.explained(error)}; with {self._config.binding}.transport ="
                f" {self._config.transport!r} no server is restarted"
            )
            raise EngineError(lost) from error
        if attempt == ATTEMPTS:
            raise EngineError(
                f"{ATTEMPTS} servers in a row failed at one request, the last with: {error}"
            ) from error
        if isinstance(error, ServerRestarted) and self._is_at(request, server):
            self._fleet.lost(server, f"{error}", time.monotonic())
        died = replica.cause_of_death() if replica is not None else None
        if died and self._is_at(request, server):
            self._fleet.lost(server, died, time.monotonic())
        self._fleet.failed(request, server, f"{error}", time.monotonic())
        self._supervisor.settle()
        self._supervisor.wake()

    async def _place(self, request: int, prefixes: Sequence[tuple[int, int]]) -> str:
        """Returns the server that the request is placed on, as soon as one takes it and no request
        that entered before it waits."""
        if not self._waiting:
            server = self._route(request, prefixes)
            if server is not None:
                return server
        place = WaitingRequest(request, prefixes, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, place)
        self.notify()
        with waiting(whose(), "a server to take its request", self._states):
            return await place.server

    def _route(self, request: int, prefixes: Sequence[tuple[int, int]]) -> str | None:
        """Places a request and returns its server; None while no server takes it. Raises:
        EngineError if none will, or none has served for too long."""
        slack = int(self._config.concurrency * SLACK)
        cached = self.prefixes.cached(prefixes)
        server = self._fleet.route(request, cached, slack, time.monotonic())
        if server is not None:
            self.prefixes.remember(prefixes, server)
            return server
        if why := self._fleet.why_hopeless():
            raise EngineError(why)
        since = self._fleet.none_since
        if since is not None and time.monotonic() - since > self._config.wait_seconds:
            reasons = "; ".join(
                f"{name}: {m.reason or m.state.value}" for name, m in self._fleet.members.items()
            )
            waited = f"no {self._config.kind} server was ready for {self._config.wait_seconds:g} s"
            setting = f"{self._config.binding}.wait_seconds"
            raise EngineError(f"{waited} ({reasons}): raise {setting} if they need longer")
        return None

    def _states(self) -> str:
        members = self._fleet.members.copy().items()
        return "; ".join(
            f"{name}: {m.state.value}{f', {m.reason}' if m.reason else ''}" for name, m in members
        )

    def _is_at(self, request: int, server: str) -> bool:
        return self._fleet.placed.get(request) == server
