"""Experimental: publishes weights from the processes that train to all servers together
(`vllm.transport = 'nccl'`, `'hccl'` or `'rdt'`), whichever servers are lost and come back meanwhile.

The trainer waits for the whole publication, so a broadcast that did not reach all servers is
repeated with the others, and with those that come back. A server that comes back between two
publications waits for the next one: nothing else holds weights that it could load.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from areal_x.engines.fleet.client import HEALTH_SECONDS, Client
from areal_x.engines.fleet.dispatcher import Dispatcher
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm import hccl_sender, nccl_sender, rdt_sender
from areal_x.engines.vllm.broadcast import (
    Broadcast,
    BroadcastFailed,
    Member,
    SendingSide,
    each,
)
from areal_x.engines.vllm.client import vllm_client
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.protocols.engine import EngineError, Staged
from areal_x.runtime import timeline
from areal_x.runtime.waits import waiting

LOOK_SECONDS = 5.0  # between two looks whether a server can still come back
SIDES: dict[str, SendingSide] = {
    "nccl": nccl_sender.SIDE,
    "hccl": hccl_sender.SIDE,
    "rdt": rdt_sender,
}


class Broadcaster:
    """Sends each version to the supervisor's servers. workers: of each, by its name."""

    restarts = True

    def __init__(
        self,
        config: VLLMConfig,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        workers: dict[str, int],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._fleet = supervisor.fleet
        self._dispatcher = dispatcher
        self._workers = workers
        self._broadcast = Broadcast(SIDES[config.transport])
        # Servers that have come back without weights, and what the others got last.
        self._joining: dict[str, asyncio.Future[None]] = {}
        self._received: dict[str, tuple[Client, int]] = {}

    def stage(self, trainer: Any, version: int) -> TrainerWeights:
        return self._broadcast.stage(trainer, version)

    def close(self) -> None:
        self._broadcast.close()

    async def prepare(self, replica: Replica) -> None:
        client = vllm_client(replica)
        await client.end_weight_transfer()  # of an earlier run
        self._workers[replica.name] = await client.workers()

    async def publish(self, staged: Staged) -> float:
        """Returns when every server that is up has the weights, with the seconds that generation was
        paused. Raises: EngineError if no server is left to send them to."""
        assert isinstance(staged, TrainerWeights)
        ready = time.monotonic()
        while True:
            members = self._members(self._fleet.begin(staged.version))
            try:
                if members:
                    return await self._send(staged, members)
                await self._one_to_come(ready)
            except BroadcastFailed as error:
                if not error.lost:
                    raise
                await self._lose(error, members)
                ready = time.monotonic()

    async def joined(self, replica: Replica) -> bool:
        """Waits until a broadcast has reached a server that has come back. Returns False if there
        was none so far."""
        if not self._received:
            return False
        if self._received.get(replica.name) == (replica.client, self._fleet.target):
            return True
        arrives = self._joining[replica.name] = asyncio.get_running_loop().create_future()
        self._dispatcher.notify()
        try:
            with waiting(replica.name, "the next version to be sent"):
                await arrives
        finally:
            if self._joining.get(replica.name) is arrives:
                del self._joining[replica.name]
        return True

    def _members(self, serving: Sequence[str]) -> list[Member]:
        """Returns the servers that are to receive weights."""
        replicas = self._supervisor.replicas
        names = [name for name in replicas if name in serving or name in self._joining]
        return [Member(replicas[name], self._workers[name]) for name in names]

    async def _send(self, staged: TrainerWeights, members: Sequence[Member]) -> float:
        """Returns the seconds that generation was paused. Raises: BroadcastFailed."""
        await self._broadcast.connect(staged, members)
        began = time.perf_counter()
        await each(members, lambda member: member.client.pause())
        await self._broadcast.send(staged, members)
        for member in members:
            self._received[member.name] = member.client, staged.version
            self._fleet.updated(member.name, time.monotonic())
            self._dispatcher.prefixes.forget(member.name)
        self._fleet.published(time.monotonic())
        for name in [member.name for member in members if member.name in self._joining]:
            self._joining.pop(name).set_result(None)
        try:
            await each(members, lambda member: member.client.resume())
        except BroadcastFailed as error:  # it has the weights, and did not answer
            await self._lose(error, members)
        self._supervisor.settle()
        ended = time.perf_counter()
        timeline.add("pause", began, ended, version=staged.version)
        return ended - began

    async def _lose(self, error: BroadcastFailed, members: Sequence[Member]) -> None:
        """Counts servers as lost; those of the run are started again."""
        for member in members:
            if member.name not in error.lost:
                continue
            if not error.torn:  # else no token may come from it
                with contextlib.suppress(EngineError):
                    await member.client.resume(HEALTH_SECONDS)
            if member.name in self._joining:
                self._joining.pop(member.name).set_exception(EngineError(f"{error}"))
            self._fleet.lost(member.name, f"{error}", time.monotonic())
        self._supervisor.settle()
        self._supervisor.wake()

    async def _one_to_come(self, since: float) -> None:
        """Waits for a server to come back. Raises: EngineError if none does within
        vllm.wait_seconds."""
        left = since + self._config.wait_seconds - time.monotonic()
        if (why := self._fleet.why_hopeless()) is not None:
            raise EngineError(why)
        if left <= 0:
            reasons = [f"{name}: {m.reason}" for name, m in self._fleet.members.items()]
            raise EngineError(
                f"no vLLM server has come back within {self._config.wait_seconds:g} s"
                f" ({'; '.join(reasons)})"
            )
        with (
            waiting("the publication", "a vLLM server to come back"),
            contextlib.suppress(TimeoutError),
        ):
            async with asyncio.timeout(min(left, LOOK_SECONDS)):
                await self._dispatcher.change()
