"""The publisher moves weights to the servers, once the stager has them in files, or from the
trainer's own memory.

    stage (trainer's thread)     a thread             swap (event loop)
    ──────────────────────────────────────────────────────────────────────────────────────
    files      copy              write to a folder    each server: pause, load, resume
    adapters   copy              write to a folder    each server: load under a new name, no pause
    GPU        nothing                                all servers: pause, receive from the GPU, resume
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.vllm import adapters
from areal_x.engines.vllm.adapters import AdapterVersions
from areal_x.engines.vllm.broadcaster import Broadcaster
from areal_x.engines.vllm.client import MODEL
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dispatcher import Dispatcher
from areal_x.engines.vllm.failures import ServerLost, ServerTorn
from areal_x.engines.vllm.gpu_transfer import GPUSender, TrainerWeights
from areal_x.engines.vllm.replica import Replica
from areal_x.engines.vllm.stager import Stager
from areal_x.engines.vllm.staging import CopiedWeights, StagedFiles
from areal_x.engines.vllm.supervisor import Supervisor
from areal_x.protocols.engine import EngineError
from areal_x.runtime import timeline
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose

T = TypeVar("T")


class Publisher:
    """Swaps weights into the supervisor's servers.

    lora: adapters are published in place of whole weights. published: called with each version as soon as it
    is current.
    """

    def __init__(
        self,
        config: VLLMConfig,
        stager: Stager,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        *,
        lora: bool,
        probe_prompt: Callable[[], Int32[np.ndarray, " T"]],
        published: Callable[[int], None],
    ) -> None:
        self.versions = AdapterVersions()
        self.gpu_sender: GPUSender | None = None  # of the transport "handles"
        self.broadcaster: Broadcaster | None = None  # of the transports "nccl" and "rdt"
        self.workers: dict[str, int] = {}  # of each server, for transports other than files
        self._config = config
        self._stager = stager
        self._supervisor = supervisor
        self._fleet = supervisor.fleet
        self._dispatcher = dispatcher
        self._lora = lora
        self._probe_prompt = probe_prompt
        self._published = published
        self._version = 0

    # ---- start and end

    def open_gpu_sender(self) -> None:
        """Prepares a transport other than files, once all servers are up."""
        if self._config.transport != "handles":
            self.broadcaster = Broadcaster(
                self._config, self._supervisor, self._dispatcher, self.workers
            )
            return
        replicas = self._supervisor.replicas
        self.gpu_sender = GPUSender(
            self._config,
            clients=[replica.client for replica in replicas.values()],
            sizes=[self.workers[name] for name in replicas],
            explain=self._explain,
        )

    async def close(self) -> None:
        """Ends the sending of weights from the trainer's own memory."""
        for sender in (self.gpu_sender, self.broadcaster):
            if sender is not None:
                with waiting(whose(), "the sending of weights to end"):
                    await asyncio.to_thread(sender.close)
        self.gpu_sender = self.broadcaster = None

    # ---- weights

    async def swap(self, staged: CopiedWeights | StagedFiles | TrainerWeights) -> float:
        if isinstance(staged, TrainerWeights):
            return await self._send(staged)
        if isinstance(staged, CopiedWeights):
            staged = await self._stager.written(staged)
        await self._supervisor.pause_comparing()
        previous, self._stager.current = self._stager.current, staged
        self._supervisor.expect(staged.version, staged.probe_logp)
        names = self._fleet.begin(staged.version)
        outcomes: dict[str, float | EngineError] = {}
        for wave in waves_of(names, self._config.waves):
            updated = await together(self._update(name, staged) for name in wave)
            outcomes |= zip(wave, updated, strict=True)
        errors = {name: x for name, x in outcomes.items() if isinstance(x, EngineError)}
        pauses = [x for x in outcomes.values() if not isinstance(x, EngineError)]
        if (
            errors
            and not pauses
            and not any(isinstance(error, ServerLost) for error in errors.values())
        ):
            self._stager.current = previous
            self._supervisor.expect(
                self._version, None if previous is None else previous.probe_logp
            )
            for name, error in errors.items():
                if isinstance(error, ServerTorn):
                    self._fleet.lost(name, f"{error}", time.monotonic())
            self._fleet.refused(time.monotonic())
            self._supervisor.settle()
            raise next(iter(errors.values()))
        for name, error in errors.items():
            self._fleet.lost(name, f"{error}", time.monotonic())
        self._set_version(staged.version)
        self._fleet.published(time.monotonic())
        self._supervisor.settle()
        if self._lora:
            await self._unload_adapters(self.versions.publish(staged))
        else:
            self._stager.keep(staged)
        self._supervisor.compare()
        return max(pauses, default=0.0)

    async def _update(self, name: str, staged: StagedFiles) -> float | EngineError:
        """Returns the seconds that the server was paused, or why it does not have the version."""
        replica = self._supervisor.replicas.get(name)
        if replica is None:
            return ServerLost(f"{name} left during the swap")
        call = replica.load(staged) if not self._lora else self._load_adapter(replica, staged)
        try:
            paused = await self._supervisor.unless_lost(call, lambda: self._fleet.serves(name))
        except EngineError as error:
            return replica.explained(error)
        if paused:
            ended = time.perf_counter()
            timeline.add("pause", ended - paused, ended, version=staged.version, server=name)
        self._dispatcher.prefixes.forget(name)
        self._fleet.updated(name, time.monotonic())
        return paused

    async def _load_adapter(self, replica: Replica, staged: StagedFiles) -> float:
        """Loads an adapter beside the versions that requests are on."""
        await replica.client.load_adapter(adapters.name_of(staged.version), staged.folder)
        return 0.0

    async def _unload_adapters(self, unused: list[StagedFiles]) -> None:
        for old in unused:
            for name in self._fleet.serving():
                if (replica := self._supervisor.replicas.get(name)) is None:
                    continue  # it left while another server unloaded
                # a server that was restarted meanwhile never had it
                with contextlib.suppress(EngineError):
                    await replica.client.unload_adapter(adapters.name_of(old.version))
            shutil.rmtree(old.folder, ignore_errors=True)

    async def _send(self, staged: TrainerWeights) -> float:
        """Sends weights to all servers together, from the trainer's own memory."""
        if self.broadcaster is None:
            return await self._send_handles(staged)
        paused = await self.broadcaster.publish(staged)
        self._set_version(staged.version)
        return paused

    async def _send_handles(self, staged: TrainerWeights) -> float:
        """After an error the server stays paused: it may have parts of two policies, and no token
        may come from that."""
        assert self.gpu_sender is not None
        await self.gpu_sender.connect(staged)
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
        await self.gpu_sender.send(staged)
        for name in self._fleet.begin(staged.version):
            self._fleet.updated(name, time.monotonic())
            self._dispatcher.prefixes.forget(name)
        self._fleet.published(time.monotonic())
        await together(
            self._explain(index, client.resume()) for index, client in enumerate(clients)
        )
        self._set_version(staged.version)
        ended = time.perf_counter()
        timeline.add("pause", began, ended, version=staged.version)
        return ended - began

    def _set_version(self, version: int) -> None:
        self._version = version
        self._published(version)

    async def _explain(self, index: int, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EngineError as error:
            raise list(self._supervisor.replicas.values())[index].explained(error) from error

    # ---- servers that join or return

    async def load_current(self, replica: Replica) -> bool:
        """Loads the newest weights into a server; returns False if none were published."""
        if self.broadcaster is not None:
            return await self.broadcaster.joined(replica)
        if self._stager.current is None:
            return False
        if self._lora:
            await replica.sync_adapters([*self.versions.held(), self._stager.current])
        else:
            with waiting(replica.name, "the next version to be staged"):
                while not self._stager.current.folder.exists():  # removed by `with_room`
                    await self._dispatcher.change()
            await replica.load(self._stager.current)
        return True

    async def probe(self, replica: Replica) -> Float32[np.ndarray, " T"]:
        """Returns a server's log-probabilities of the probe prompt under the newest weights."""
        adapter = self._stager.current if self._lora else None
        model = MODEL if adapter is None else adapters.name_of(adapter.version)
        return await replica.client.probe(model, self._probe_prompt().tolist())


def waves_of(names: Sequence[str], count: int) -> list[Sequence[str]]:
    """Returns the servers in at most this many groups, whose sizes differ by one at most."""
    groups = (names[wave::count] for wave in range(count))
    return [group for group in groups if group]
