"""The publisher moves weights to the servers, once the stager has them in files, or from the
trainer's own memory.

    stage (trainer's thread)     a thread             swap (event loop)
    ──────────────────────────────────────────────────────────────────────────────────────
    files      copy              write to a folder    each server: pause, load, resume
    deltas     copy              write what changed   each server: apply it, pause, load, resume
    adapters   copy              write to a folder    each server: load under a new name, no pause
    direct     nothing                                all servers: pause, receive from the trainer, resume

With train.colocate the servers sleep while weights are trained and staged, and a swap wakes them.
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

from areal_x.engines.fleet import adapters
from areal_x.engines.fleet.adapters import AdapterVersions
from areal_x.engines.fleet.client import MODEL
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.delta.feed import Feed
from areal_x.engines.fleet.dispatcher import Dispatcher
from areal_x.engines.fleet.failures import ServerLost, ServerTorn, WeightsDiffer
from areal_x.engines.fleet.proof.prover import Prover
from areal_x.engines.fleet.replica import DirectSender, Replica
from areal_x.engines.fleet.stager import Stager
from areal_x.engines.fleet.staging import CopiedWeights, StagedFiles
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.protocols.engine import EngineError, Staged
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
        config: FleetConfig,
        stager: Stager,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        *,
        lora: bool,
        probe_prompt: Callable[[], Int32[np.ndarray, " T"]],
        published: Callable[[int], None],
        report: Callable[[str], None],
    ) -> None:
        self.versions = AdapterVersions()
        self.sender: DirectSender | None = None  # None if weights go through files
        self._config = config
        self._stager = stager
        self._supervisor = supervisor
        self._fleet = supervisor.fleet
        self._dispatcher = dispatcher
        self._lora = lora
        self._probe_prompt = probe_prompt
        self._published = published
        self._version = 0
        self._prover = Prover(stager.dtypes, report, stager.whole)
        self._feed = Feed(config, stager, report)

    # ---- start and end

    async def close(self) -> None:
        """Ends the sending of weights from the trainer's own memory, and removes servers' caches."""
        sender, self.sender = self.sender, None
        if sender is not None:
            with waiting(whose(), "the sending of weights to end"):
                await asyncio.to_thread(sender.close)
        replicas = self._supervisor.replicas
        await together(self._feed.forget(replicas[name]) for name in self._fleet.serving())

    # ---- sleep

    async def sleep(self) -> None:
        """Puts all servers to sleep: they freeze their requests and release their memory, adapters'
        servers all but a copy of their weights on the host. One that does not is ended, and started
        again once the others wake. None is being started when this returns."""
        self._fleet.sleep()
        await self._supervisor.pause_comparing()
        await self._supervisor.still()
        await self._each(lambda replica: replica.sleep(keep_weights=self._lora))

    async def wake(self) -> None:
        """Wakes servers that sleep, with the newest weights that were published.

        Raises: EngineError if none were, or no server has them afterwards.
        """
        if not self._fleet.asleep:
            return
        current = self._stager.current
        if current is None:
            raise EngineError("servers that sleep need weights to wake, and none were published")
        if not self._lora:
            await self.swap(current)
            return
        self._supervisor.wakes()
        await self._each(Replica.wake)

    async def _each(self, call: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        """Makes a call to every server that serves. One that fails at it is ended, and so lost."""

        async def error_of(name: str) -> EngineError | None:
            replica = self._supervisor.replicas[name]
            try:
                await self._supervisor.unless_lost(call(replica), lambda: self._fleet.serves(name))
            except EngineError as error:
                explained = replica.explained(error)
                await replica.close()
                return explained
            return None

        names = self._fleet.serving()
        errors = await together(error_of(name) for name in names)
        for name, error in zip(names, errors, strict=True):
            if error is not None:
                self._supervisor.failed(name, error)
        self._supervisor.settle()

    # ---- weights

    async def swap(self, staged: Staged) -> float:
        if self.sender is not None:
            paused = await self.sender.publish(staged)
            self._set_version(staged.version)
            return paused
        if isinstance(staged, CopiedWeights):
            staged = await self._stager.written(staged)
        assert isinstance(staged, StagedFiles)
        await self._supervisor.pause_comparing()
        self._supervisor.wakes()
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
                if isinstance(error, ServerTorn | WeightsDiffer):
                    self._supervisor.failed(name, error)
            self._fleet.refused(time.monotonic())
            self._supervisor.settle()
            raise next(iter(errors.values()))
        for name, error in errors.items():
            self._supervisor.failed(name, error)
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
        call = (
            self._load_adapter(replica, staged)
            if self._lora
            else replica.load(staged, self._prove, self._feed.place)
        )
        try:
            paused = await self._supervisor.unless_lost(call, lambda: self._fleet.serves(name))
        except WeightsDiffer as error:
            return error
        except EngineError as error:
            return replica.explained(error)
        if paused:
            ended = time.perf_counter()
            timeline.add("pause", ended - paused, ended, version=staged.version, server=name)
        self._dispatcher.prefixes.forget(name)
        self._fleet.updated(name, time.monotonic())
        return paused

    async def _prove(self, replica: Replica, staged: StagedFiles) -> None:
        """Proves a server's weights. What it read wrong ones from is not read again."""
        try:
            await self._prover.prove(replica, staged)
        except WeightsDiffer:
            await self._feed.forget(replica)
            raise

    async def _load_adapter(self, replica: Replica, staged: StagedFiles) -> float:
        """Loads an adapter beside the versions that requests are on."""
        await replica.wake()
        await replica.client.load_adapter(adapters.name_of(staged.version), staged.folder)
        await self._prover.prove(replica, staged)
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

    def _set_version(self, version: int) -> None:
        self._version = version
        self._published(version)

    # ---- servers that join or return

    async def load_current(self, replica: Replica) -> bool:
        """Loads the newest weights into a server; returns False if none were published."""
        if self.sender is not None:
            return await self.sender.joined(replica)
        if self._stager.current is None:
            return False
        if self._lora:
            await replica.sync_adapters([*self.versions.held(), self._stager.current])
            await self._prover.prove(replica, self._stager.current)
        else:
            with waiting(replica.name, "the next version to be staged"):
                while not self._stager.current.folder.exists():  # removed by `with_room`
                    await self._dispatcher.change()
            await replica.load(self._stager.current, self._prove, self._feed.place)
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
