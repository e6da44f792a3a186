"""The number of servers of a run: the shell around the decisions of areal_x.engines.fleet.scaling.

    after each step ──▶ Scaling: how many      every second, if servers are the run's own:
                                                 too few       another one is started, where there is room
                                                 too many      one hands over its requests, and ends
                                                 a node goes   its servers are replaced, hand over, and end

Starting a server is the supervisor's: it waits for room in the background, gives the server the
newest weights and checks it before it serves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress

from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.fleet import FINAL
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.fleet.scaling import Scaling, Seen, changes
from areal_x.engines.fleet.server import Starter
from areal_x.engines.fleet.supervisor import POLL_SECONDS, Supervisor, cancel_and_wait
from areal_x.runtime import background
from areal_x.runtime.waits import on_behalf_of, waiting

WATCH = "the watch over the number of servers"


class Elastic:
    """Keeps as many servers as are wanted. All of it runs on the supervisor's event loop.

    make: returns the server with a number, not yet started.
    """

    def __init__(
        self,
        config: FleetConfig,
        supervisor: Supervisor,
        starter: Starter,
        make: Callable[[int], Replica],
        report: Callable[[str], None],
    ) -> None:
        self._supervisor, self._starter = supervisor, starter
        self._make, self._report = make, report
        self._scaling = Scaling(*config.bounds)
        self._watched = not config.urls
        self._departing: set[int] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Adds the servers that the run begins with."""
        for _ in range(self._scaling.wanted):
            self._add()

    def watch(self) -> None:
        """Starts watching the number of servers and their nodes in the background."""
        if self._watched:
            with on_behalf_of(WATCH, moves=False):
                self._watching = background.start(
                    self._watch(), "the watch over the number of servers"
                )

    async def close(self) -> None:
        for task in (self._watching, *self._leaving.values()):
            if task is not None:
                await cancel_and_wait(task)
        self._watching = None
        self._leaving.clear()

    def step(self, trainer_idle: float, rollout_idle: float) -> None:
        """Counts a step of the run, and changes the number of servers if it is time to."""
        seen, replicas = self._seen(), self._supervisor.replicas
        coming = [server.name for server in seen if not server.serves and not server.final]
        starting = any(replicas[name].server is not None for name in coming)
        reason = self._scaling.step(trainer_idle, rollout_idle, len(seen) - len(coming), starting)
        if reason is not None:
            self._report(reason)
            self._changed.set()

    async def leave(self, name: str) -> None:
        """Removes one of the run's servers for good."""
        self._scaling.fewer()
        await self._supervisor.remove(name)

    async def _watch(self) -> None:
        while True:
            departing = await asyncio.to_thread(self._starter.departing)
            self._tell(departing - self._departing)
            self._departing = departing
            self.settle()
            with waiting(WATCH, "the next look at the nodes", idle=True), suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    def settle(self) -> None:
        """Adds and removes servers until there are as many as are wanted."""
        self._leaving = {name: task for name, task in self._leaving.items() if not task.done()}
        add, leave = changes(self._seen(), self._scaling.wanted)
        for _ in range(add):
            self._add()
        for name in leave:
            with on_behalf_of(name):
                self._leaving[name] = background.start(
                    self._supervisor.remove(name), f"the leave of {name}"
                )
        if add:
            self._supervisor.wake()

    def _seen(self) -> list[Seen]:
        fleet, replicas = self._supervisor.fleet, self._supervisor.replicas
        return [
            Seen(
                name=name,
                serves=member.serves,
                final=member.state in FINAL,
                departs=replicas[name].number in self._departing,
                requests=len(member.requests),
            )
            for name, member in fleet.members.items()
            if member.ours and name not in self._leaving and not fleet.is_leaving(name)
        ]

    def _add(self) -> None:
        taken = {replica.number for replica in self._supervisor.replicas.values() if replica.ours}
        number = next(number for number in itertools.count() if number not in taken)
        self._supervisor.add(self._make(number))

    def _tell(self, departing: set[int]) -> None:
        for replica in self._supervisor.replicas.values():
            if replica.ours and replica.number in departing:
                self._report(f"the node of {replica.name} is being drained: it is placed elsewhere")
