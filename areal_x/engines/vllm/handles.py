"""Experimental: publishes weights to one server on the trainer's own GPU
(`vllm.transport = 'handles'`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from areal_x.engines.fleet.dispatcher import Dispatcher
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.client import vllm_client
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.gpu_transfer import GPUSender, TrainerWeights
from areal_x.protocols.engine import EngineError, Staged
from areal_x.runtime import timeline
from areal_x.runtime.loop import together

T = TypeVar("T")


class HandlesSender:
    """Sends each version to the run's server, by handles of the trainer's memory
    (areal_x.engines.fleet.replica.DirectSender)."""

    restarts = False

    def __init__(self, config: VLLMConfig, supervisor: Supervisor, dispatcher: Dispatcher) -> None:
        self._config = config
        self._supervisor = supervisor
        self._fleet = supervisor.fleet
        self._dispatcher = dispatcher
        self._workers: dict[str, int] = {}
        self._sender: GPUSender | None = None

    def stage(self, trainer: Any, version: int) -> TrainerWeights:
        return self._opened().stage(trainer, version)

    async def prepare(self, replica: Replica) -> None:
        client = vllm_client(replica)
        await client.end_weight_transfer()  # of an earlier run
        self._workers[replica.name] = await client.workers()

    async def publish(self, staged: Staged) -> float:
        """After an error the server stays paused: it may have parts of two policies, and no token
        may come from that."""
        assert isinstance(staged, TrainerWeights)
        sender = self._opened()
        await sender.connect(staged)
        began = time.perf_counter()
        clients = [replica.client for replica in self._supervisor.replicas.values()]
        try:
            await together(
                self._explain(index, client.pause()) for index, client in enumerate(clients)
            )
        except BaseException:
            for client in clients:
                with contextlib.suppress(Exception):
                    await client.resume()
            raise
        await sender.send(staged)
        for name in self._fleet.begin(staged.version):
            self._fleet.updated(name, time.monotonic())
            self._dispatcher.prefixes.forget(name)
        self._fleet.published(time.monotonic())
        await together(
            self._explain(index, client.resume()) for index, client in enumerate(clients)
        )
        ended = time.perf_counter()
        timeline.add("pause", began, ended, version=staged.version)
        return ended - began

    async def joined(self, replica: Replica) -> bool:
        return False  # no server is restarted

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _opened(self) -> GPUSender:
        if self._sender is None:
            replicas = self._supervisor.replicas
            self._sender = GPUSender(
                self._config,
                clients=[vllm_client(replica) for replica in replicas.values()],
                sizes=[self._workers[name] for name in replicas],
                explain=self._explain,
            )
        return self._sender

    async def _explain(self, index: int, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EngineError as error:
            raise list(self._supervisor.replicas.values())[index].explained(error) from error
