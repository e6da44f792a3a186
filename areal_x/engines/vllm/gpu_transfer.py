"""Experimental: `vllm.transport = 'handles'`: CUDA IPC handles of the trainer's memory, one gibibyte
of it after the other, which a server on the same GPU opens, by vLLM's own weight-transfer engines.

It has not run on GPUs or with a real server: docs/torch.md lists what the tests cover.

Nothing can be staged: the sender waits for the receiver, which can receive only while nothing else
runs. Generation is therefore paused for as long as the sending takes, where with files it is
paused only for the reading.

vLLM's sender blocks: it has a thread of its own, which talks to the server through the event loop's
client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.nccl_sender import weight_source
from areal_x.errors import ConfigError
from areal_x.protocols.engine import EngineError, Staged
from areal_x.runtime import background
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting

if TYPE_CHECKING:
    from areal_x.engines.vllm.config import VLLMConfig

Explain = Callable[[int, Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True)
class TrainerWeights(Staged):
    """Weights that stay in the trainer's memory until the swap sends them."""

    trainer: Any

    device: int | None
    """Index of the trainer's GPU or NPU; None if the trainer is in other processes."""

    reads_trainer: bool = True


class GPUSender:
    """The sending side for the server of a run.

    sizes: the number of workers of each client's server. explain: adds what is known of a server to
    the error of a call to it.
    """

    def __init__(
        self,
        config: VLLMConfig,
        clients: Sequence[VLLMClient],
        sizes: Sequence[int],
        explain: Explain,
    ) -> None:
        if list(sizes) != [1]:
            wanted = (
                "without parallelism with vllm.transport = 'handles', which supports one GPU (this"
                f" server has {sum(sizes)} workers)"
            )
            raise ConfigError("vllm.arguments", config.arguments, wanted)
        self._clients = clients
        self._explain = explain
        self._source: Any = None
        self._sender: Any = None  # vLLM's TrainerWeightTransferEngine
        self._broken = False

    def stage(self, trainer: Any, version: int) -> TrainerWeights:
        """Records what to send; the trainer must not change until it is sent. Called on the
        trainer's thread, which determines the GPU."""
        import torch

        if self._source is None:
            self._source = weight_source(trainer)
        return TrainerWeights(trainer=trainer, version=version, device=torch.cuda.current_device())

    async def connect(self, staged: TrainerWeights) -> None:
        """Connects both sides on the first call; generation goes on except while the servers do
        their part."""
        if self._sender is None:
            await self._in_thread(staged, self._connect)

    async def send(self, staged: TrainerWeights) -> None:
        """Sends weights and version to paused servers. After an error some may have a part of them,
        which vLLM's receiving side would take for the beginning of the next version: nothing is
        sent to them again."""
        if self._broken:
            raise EngineError(
                "an earlier update broke off, and servers may have parts of two policies: restart"
                " the run"
            )
        try:
            await self._in_thread(staged, self._send)
        except BaseException:
            self._broken = True
            raise

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown()

    def _connect(self, calls: WeightSyncClient) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        init = IPCTrainerInitInfo(rank=0, packed=True)
        self._sender = IPCTrainerWeightTransferEngine.trainer_init(
            init, client=calls, source=self._source
        )

    def _send(self, calls: WeightSyncClient) -> None:
        import torch

        # vLLM packs on its own CUDA streams, which do not wait for the optimizer step on the
        # trainer's.
        torch.cuda.synchronize()
        self._sender.client = calls
        self._sender.send_weights()

    async def _in_thread(
        self, staged: TrainerWeights, work: Callable[[WeightSyncClient], None]
    ) -> None:
        """Runs `work` in a thread. Returns with it, or raises the first error of a server: the
        thread may then wait forever for that server in a collective, and as a daemon it is not
        waited for."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[None] = loop.create_future()

        def end(error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result(None) if error is None else outcome.set_exception(error)

        def run() -> None:
            import torch

            error = None
            try:
                with torch.cuda.device(staged.device):
                    self._source.trainer = staged.trainer
                    work(
                        WeightSyncClient(
                            self._clients, self._explain, loop, str(staged.version), end
                        )
                    )
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(end, error)

        background.thread(run, what="sending weights", failed=background.on_loop(), name="weights")
        with waiting(
            "the trainer",
            "its weights to be sent",
            f"version {staged.version} to {len(self._clients)} servers",
        ):
            await outcome


class WeightSyncClient:
    """The interface through which vLLM's senders call the receiving side (vLLM's
    `VLLMWeightSyncClient`), for all servers at once.

    version: the servers' weight version after the update. failed: called with a server's error at
    once.
    """

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        explain: Explain,
        loop: asyncio.AbstractEventLoop,
        version: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._clients, self._explain, self._loop = clients, explain, loop
        self._version, self._failed = version, failed

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._begin([client.init_weight_transfer(init_info) for client in self._clients]).result()

    def start_weight_update(self) -> None:
        self._begin([client.start_update() for client in self._clients]).result()

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        info = _json_safe_update_payload(update_info)
        self._begin([client.update_weights(info) for client in self._clients]).result()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version or self._version  # vLLM's senders pass none
        self._begin([client.finish_update(version) for client in self._clients]).result()

    def _begin(self, calls: Sequence[Coroutine[Any, Any, None]]) -> Any:
        async def make() -> None:
            try:
                await together(self._explain(index, call) for index, call in enumerate(calls))
            except Exception as error:
                self._failed(error)
                raise

        return asyncio.run_coroutine_threadsafe(make(), self._loop)
