"""Experimental: the engine's side of the transports "nccl", "hccl" and "rdt": it makes the servers'
calls, while the processes that train send (areal_x.engines.vllm.group_sender, rdt_sender).

    connect    each server joins the processes that train, with all its workers
    send       the servers receive, while the processes that train send

The group is made anew whenever its members change: when a server was lost, or has come back. A
server that fails before the broadcast begins leaves the others as they are. If one fails in the
middle, nothing tells how much the others have received (NCCL may never return there, and vLLM's
producers wait for every worker): all of them have to be restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from areal_x.engines.fleet.addresses import is_local
from areal_x.engines.fleet.failures import ServerFailed
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.vllm.client import VLLMClient, vllm_client
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.protocols.engine import EngineError
from areal_x.protocols.trainer import InProcesses
from areal_x.runtime import background
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting

T = TypeVar("T")


class SendingSide(Protocol):
    """The functions of the processes that train, of a module or an object."""

    @property
    def invite(self) -> Callable[..., dict[str, Any]]: ...

    @property
    def joining(self) -> Callable[[dict[str, Any], Sequence[int]], list[dict[str, Any]]]: ...

    @property
    def connect(self) -> Callable[..., None]: ...

    @property
    def describe(self) -> Callable[..., dict[str, Any]]: ...

    @property
    def send(self) -> Callable[..., str | None]:
        """Returns why it gave the servers up, if it did; an exception is the trainer's own."""
        ...

    @property
    def leave(self) -> Callable[..., None]: ...


class BroadcastFailed(EngineError):
    """A broadcast did not reach all servers. lost: the names of those that failed; none if the
    sending side did. torn: all servers may have parts of two policies."""

    def __init__(self, message: str, lost: Sequence[str], torn: bool = False) -> None:
        super().__init__(message)
        self.lost, self.torn = lost, torn


class GivenUp(BroadcastFailed):
    """The sending side gave the servers up."""


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
        return vllm_client(self.replica)


class Broadcast:
    """The group of a run's servers and its trainer."""

    def __init__(self, side: SendingSide) -> None:
        self._side = side
        self._given_up: int | None = None  # the version that was given up last
        self._has_sent = False
        self._connected: list[VLLMClient] = []  # a server that was restarted has another client
        self._staged: TrainerWeights | None = None

    def stage(self, trainer: Any, version: int) -> TrainerWeights:
        """Records what to send; the trainer must not change until it is sent. Called on the
        trainer's thread, which determines the device."""
        device = None
        if not isinstance(trainer, InProcesses):
            import torch

            device = torch.accelerator.current_device_index()
        return TrainerWeights(trainer=trainer, version=version, device=device)

    async def connect(self, staged: TrainerWeights, members: Sequence[Member]) -> None:
        """Makes these servers the group, if they are not; generation goes on except while they do
        their part. Raises: BroadcastFailed."""
        clients = [member.client for member in members]
        if clients == self._connected:
            return
        before, self._connected = self._connected, []
        await each(members, lambda m: end_of(m.client) if m.client in before else nothing())
        sizes = [member.workers for member in members]
        here = all(is_local(client.url) for client in clients)
        invitation = await self._run(staged, self._side.invite, sizes, here)
        infos = self._side.joining(invitation, sizes)
        info_of = {member.name: info for member, info in zip(members, infos, strict=True)}
        try:
            await self._both(
                staged,
                members,
                lambda m: m.client.init_weight_transfer(info_of[m.name]),
                (self._side.connect, invitation),
            )
        except BroadcastFailed as error:
            if self._has_sent or not isinstance(error.__cause__, ServerFailed):
                raise
            raise BroadcastFailed(f"{error}", []) from error  # another start would not help
        self._connected = clients

    async def send(self, staged: TrainerWeights, members: Sequence[Member]) -> None:
        """Sends weights and version to the paused members. Raises: BroadcastFailed."""
        info = await self._run(staged, self._side.describe)
        await each(members, lambda m: m.replica.start_update())
        try:
            await self._both(
                staged, members, lambda m: m.client.update_weights(info), (self._side.send,)
            )
            await each(members, lambda m: m.client.finish_update(str(staged.version)))
            self._has_sent = True
        except BroadcastFailed as error:
            self._connected = []
            retry = isinstance(error, GivenUp) and self._given_up != staged.version
            self._given_up = staged.version if retry else self._given_up
            names = [member.name for member in members] if error.lost or retry else []
            reason = f"{error}; all servers of the broadcast may have parts of two policies"
            raise BroadcastFailed(reason, names, torn=True) from error

    def close(self) -> None:
        if self._staged is not None:
            self._start(self._staged, self._side.leave, beside=True).result()

    async def _both(
        self,
        staged: TrainerWeights,
        members: Sequence[Member],
        receive: Callable[[Member], Coroutine[Any, Any, None]],
        send: tuple[Callable[..., Any], *tuple[Any, ...]],
    ) -> None:
        """Makes both sides' calls together, as each waits for the other. If one fails, the other is
        not waited for."""
        sending = asyncio.ensure_future(self._sent(staged, *send))
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
        # the server first, as the sending side fails after it
        failed = [t for t in (receiving, sending) if t in done and t.exception() is not None]
        if not failed:
            return
        self._connected = []
        for task in left:
            task.cancel()
        await self._run(staged, self._side.leave, beside=True)
        with waiting("the trainer", "its weights to be sent", "calls that are given up"):
            await asyncio.gather(*left, return_exceptions=True)
        error = failed[0].exception()
        assert error is not None
        if isinstance(error, EngineError):
            raise error
        raise BroadcastFailed(f"the weights could not be sent: {error}", []) from error

    async def _sent(self, staged: TrainerWeights, *send: Any) -> None:
        """Makes the sending side's call. Raises: GivenUp, and what the call does."""
        if (reason := await self._run(staged, *send)) is not None:
            raise GivenUp(f"the weights could not be sent: {reason}", [])

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

            with torch.accelerator.device_index(staged.device):
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
