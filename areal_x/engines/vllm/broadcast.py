"""Experimental: the engine's side of `vllm.transport = 'nccl'`: it tells the servers what the
trainer's first process broadcasts to them (areal_x.engines.vllm.nccl_sender).

    connect    each server joins a group of all workers, with the first process as rank 0
    send       the servers receive, while the processes that train send

The group is made anew whenever its members change: when a server was lost, or has come back. A
server that fails before the broadcast begins leaves the others as they are. If one fails in the
middle, nothing tells how much the others have received, and NCCL may never return there: all of
them have to be restarted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_x.engines.vllm import nccl_sender
from areal_x.engines.vllm.addresses import is_local
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.engines.vllm.replica import Replica
from areal_x.protocols.engine import EngineError
from areal_x.protocols.trainer import InProcesses
from areal_x.runtime import background
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting

T = TypeVar("T")


class BroadcastFailed(EngineError):
    """A broadcast did not reach all servers. lost: the names of those that failed; none if the
    sending side did. torn: all servers may have parts of two policies."""

    def __init__(self, message: str, lost: Sequence[str], torn: bool = False) -> None:
        super().__init__(message)
        self.lost, self.torn = lost, torn


@dataclass(frozen=True)
class Member:
    """A server of the group. workers: their number."""

    replica: Replica
    workers: int

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def client(self) -> VLLMClient:
        return self.replica.client


class Broadcast:
    """The group of a run's servers and its trainer."""

    def __init__(self) -> None:
        self._connected: list[VLLMClient] = []  # a server that was restarted has another client
        self._staged: TrainerWeights | None = None

    def stage(self, trainer: Any, version: int) -> TrainerWeights:
        """Records what to send; the trainer must not change until it is sent. Called on the
        trainer's thread, which determines the GPU."""
        device = None
        if not isinstance(trainer, InProcesses):
            import torch

            device = torch.cuda.current_device()
        return TrainerWeights(trainer=trainer, version=version, device=device)

    async def connect(self, staged: TrainerWeights, members: Sequence[Member]) -> None:
        """Makes these servers the group, if they are not; generation goes on except while they do
        their part. Raises: BroadcastFailed."""
        clients = [member.client for member in members]
        if clients == self._connected:
            return
        before, self._connected = self._connected, []
        await each(members, lambda m: end_of(m.client) if m.client in before else nothing())
        world_size = 1 + sum(member.workers for member in members)
        here = all(is_local(client.url) for client in clients)
        invitation = await self._run(staged, nccl_sender.invite, world_size, here)
        before_each = itertools.accumulate((member.workers for member in members), initial=1)
        offsets = {member.name: rank for member, rank in zip(members, before_each, strict=False)}
        await self._both(
            staged,
            members,
            lambda m: m.client.init_weight_transfer({**invitation, "rank_offset": offsets[m.name]}),
            (nccl_sender.connect, invitation),
        )
        self._connected = clients

    async def send(self, staged: TrainerWeights, members: Sequence[Member]) -> None:
        """Sends weights and version to the paused members. Raises: BroadcastFailed."""
        info = await self._run(staged, nccl_sender.describe)
        await each(members, lambda m: m.replica.start_update())
        try:
            await self._both(
                staged, members, lambda m: m.client.update_weights(info), (nccl_sender.send,)
            )
            await each(members, lambda m: m.client.finish_update(str(staged.version)))
        except BroadcastFailed as error:
            self._connected = []
            names = [member.name for member in members] if error.lost else []
            reason = f"{error}; all servers of the broadcast may have parts of two policies"
            raise BroadcastFailed(reason, names, torn=True) from error

    def close(self) -> None:
        if self._staged is not None:
            self._start(self._staged, nccl_sender.leave, beside=True).result()

    async def _both(
        self,
        staged: TrainerWeights,
        members: Sequence[Member],
        receive: Callable[[Member], Coroutine[Any, Any, None]],
        send: tuple[Callable[..., Any], *tuple[Any, ...]],
    ) -> None:
        """Makes both sides' calls together, as each waits for the other. If one fails, the other is
        not waited for."""
        sending = asyncio.ensure_future(self._run(staged, *send))
        receiving = asyncio.ensure_future(each(members, receive))
        detail = f"version {staged.version} to {len(members)} servers"
        try:
            with waiting("the trainer", "its weights to be sent", detail):
                done, left = await asyncio.wait(
                    [receiving, sending], return_when=asyncio.FIRST_EXCEPTION
                )
        except BaseException:  # the run ends
            receiving.cancel()
            sending.cancel()
            raise
        failed = [task for task in done if task.exception() is not None]
        if not failed:
            return
        self._connected = []
        for task in left:
            task.cancel()
        await self._run(staged, nccl_sender.leave, beside=True)
        with waiting("the trainer", "its weights to be sent", "calls that are given up"):
            await asyncio.gather(*left, return_exceptions=True)
        error = failed[0].exception()
        assert error is not None
        if isinstance(error, EngineError):
            raise error
        raise BroadcastFailed(f"the weights could not be sent: {error}", []) from error

    async def _run(
        self,
        staged: TrainerWeights,
        function: Callable[..., T],
        *arguments: Any,
        beside: bool = False,
    ) -> T:
        """Calls a function with the trainer where it is."""
        with waiting(
            "the trainer", "its weights to be sent", f"its process to {function.__name__}"
        ):
            return await asyncio.wrap_future(
                self._start(staged, function, *arguments, beside=beside)
            )

    def _start(
        self,
        staged: TrainerWeights,
        function: Callable[..., T],
        *arguments: Any,
        beside: bool = False,
    ) -> Any:
        self._staged = staged

        def here() -> T:
            import torch

            with torch.cuda.device(staged.device):
                return function(staged.trainer, 0, *arguments)

        def there() -> T:
            result: T = staged.trainer.apply(function, *arguments, beside=beside)
            return result

        work = there if isinstance(staged.trainer, InProcesses) else here
        return background.future(work, name="weights")


async def each(
    members: Sequence[Member], call: Callable[[Member], Coroutine[Any, Any, None]]
) -> None:
    """Makes a call to each server. Raises: BroadcastFailed, naming the first that failed."""

    async def of(member: Member) -> None:
        try:
            await call(member)
        except EngineError as error:
            explained = member.replica.explained(error)
            raise BroadcastFailed(f"{explained}", [member.name]) from error

    await together(of(member) for member in members)


async def end_of(client: VLLMClient) -> None:
    await client.end_weight_transfer()


async def nothing() -> None: ...
