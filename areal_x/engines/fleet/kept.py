"""Servers that outlive an engine: where processes that train are lost, the next attempt of the run
goes on with the servers of the one before, which take minutes to start."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from areal_x.engines.fleet.server import Launch, StartedServer, Starter, end_all
from areal_x.runtime.waits import waiting, whose


class KeptServers:
    """Starts servers (areal_x.engines.fleet.server.Starter), or returns those that an earlier engine
    started alike. starter: starts those that are missing."""

    keeps = True

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._held: dict[int, tuple[Launch, StartedServer]] = {}  # by their numbers

    async def start(self, number: int, launch: Launch) -> StartedServer:
        if (held := self._held.pop(number, None)) is not None:
            before, server = held
            # The seed and the folder of weights are each engine's own.
            alike = replace(launch, seed=before.seed, staging=before.staging) == before
            if alike and server.poll() is None:
                self._held[number] = before, server
                return server
            with waiting(whose(), "its process to end", f"process {server.pid}"):
                await asyncio.to_thread(server.stop)
        server = await self._starter.start(number, launch)
        self._held[number] = launch, server
        return server

    def departing(self) -> set[int]:
        return self._starter.departing()

    def vacate(self, number: int) -> None:
        self._held.pop(number, None)
        self._starter.vacate(number)

    def end(self) -> None:
        """Ends all servers; returns when they are gone."""
        servers = [server for _, server in self._held.values()]
        self._held.clear()
        end_all(servers)
