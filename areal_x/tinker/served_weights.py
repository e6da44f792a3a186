"""Weights on servers, vLLM's or SGLang's: the base that they were started with, and beside it the
adapters of all models at once.

An adapter goes to the servers as the files of its snapshot, under a name that is made for this
snapshot: neither the snapshot of another version nor a client's choice can be read under it. It leaves
them when its snapshot expires or is deleted, and when too many others came since its last request.
Whole models are sampled by the embedded engine, as the servers' own weights stay the base's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.named_adapters import AdapterRoom
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import Completion, Request
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig
from areal_x.runtime import background
from areal_x.runtime.loop import together
from areal_x.runtime.thread import OneThread
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import NOT_THERE, Shape, Source
from areal_x.tinker.sampling import Generate

if TYPE_CHECKING:
    from areal_x.engines.fleet.engine import FleetEngine

MOST_ADAPTERS = 16  # on the servers, besides those whose requests run
CLOSING_SECONDS = 10.0  # in which servers that go on unload adapters
LOOK_SECONDS = 60.0  # between two looks for adapters whose snapshots are gone


@dataclass(eq=False)
class Served:
    """An adapter on the servers, or on its way there. users: its requests. name: on the servers."""

    source: Source
    users: int = 0
    name: asyncio.Future[str] | None = None


class ServedWeights:
    """The servers, and the adapters on them. Used on one event loop.

    whole: samples whole models.
    """

    def __init__(
        self,
        engine: FleetEngine[Any],
        host: TrainerHost,
        thread: OneThread,
        whole: EmbeddedWeights,
    ) -> None:
        self.engine = engine
        self.host = host
        self._thread = thread
        self._whole = whole
        self._adapters: dict[str, Served] = {}  # the least recently used first
        self._looking: asyncio.Task[None] | None = None

    async def start(self, working: Path) -> None:
        """Starts the servers. working: a directory for states of models.

        Raises: UserError if none serves the base.
        """
        base = Source("base", None, working / "served-base")

        def logp(prompt: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T"]:
            own = self.host.logprobs(base, prompt, prompt[1:, None])
            return np.append(np.zeros(1, np.float32), own)

        await self._thread.run(self.engine.expect, logp)
        await self.engine.start()
        self._looking = background.start(self._look(), "the search for expired adapters")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._whole.close()
        if self.engine.config.urls:  # others go on
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await together(map(self._remove, list(self._adapters.values())))
        await self.engine.close()

    def check(self, shape: Shape) -> None:
        """Raises: UserError for adapters that the servers have no room for."""
        if shape.rank > self.engine.room.rank:
            raise UserError(
                f"this server samples adapters up to rank {self.engine.room.rank}, and not of rank"
                f" {shape.rank}: take a smaller one, or start the server with --max-rank {shape.rank}"
            )

    @asynccontextmanager
    async def holding(self, source: Source) -> AsyncIterator[Generate]:
        """Gives what samples from these weights, which stay until the end."""
        if source.shape is None:
            yield partial(self._generate, None)
            return
        if not source.shape.rank:
            async with self._whole.holding(source) as generate:
                yield generate
            return
        self.check(source.shape)
        key = source.name
        served = self._adapters[key] = self._adapters.pop(key, Served(source))
        served.users += 1
        try:
            if served.name is None:
                served.name = asyncio.get_running_loop().create_future()
                background.start(self._add(served, served.name), "an adapter for the servers")
            yield partial(self._generate, await asyncio.shield(served.name))
        finally:
            served.users -= 1

    async def _generate(
        self, adapter: str | None, requests: Sequence[Request]
    ) -> Sequence[Completion]:
        return await together(self.engine.generate(replace(x, adapter=adapter)) for x in requests)

    async def _add(self, served: Served, name: asyncio.Future[str]) -> None:
        """Brings an adapter to where the servers find it, in place of some that nobody uses."""
        source = served.source
        try:
            await self._remove_unused()
            try:
                added = await self.engine.add_adapter(source.directory / "state")
            except FileNotFoundError as error:
                raise UserError(NOT_THERE) from error
            if not source.is_there():  # it may have been replaced meanwhile
                await self.engine.remove_adapter(added)
                raise UserError(NOT_THERE)
        except Exception as failure:
            self._adapters.pop(source.name, None)
            name.set_exception(failure)
            name.exception()  # perhaps nobody waits for it any more
        else:
            name.set_result(added)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._remove_unused()

    async def _remove_unused(self) -> None:
        """Removes adapters without requests: those whose snapshots are gone, and the least recently
        used beyond the limit."""
        idle = [x for x in self._adapters.values() if not x.users]
        gone = [x for x in idle if not x.source.is_there()]
        rest = [x for x in idle if x not in gone]
        for served in [*gone, *rest[: max(len(rest) - MOST_ADAPTERS, 0)]]:
            if served.users or self._adapters.get(served.source.name) is not served:
                continue  # it was wanted, or removed, while another one was unloaded
            await self._remove(served)

    async def _remove(self, served: Served) -> None:
        del self._adapters[served.source.name]
        if served.name is not None:
            with suppress(Exception):  # its requests have seen it
                await self.engine.remove_adapter(await served.name)


def create_engine(
    config: FleetConfig,
    lora: LoRAConfig,
    room: AdapterRoom,
    directory: Path,
    root: Path,
    report: Callable[[str], None],
) -> FleetEngine[Any]:
    """Returns the engine over the servers of a config, not yet started.

    directory: the model's. lora: which kernels adapters have. root: for the servers' logs, and for
    links to adapters unless the config names another folder. report: shows what servers do.

    Raises: ConfigError.
    """
    if of_experts := [x for x in lora.targets if x.startswith(EXPERTS)]:
        wanted = f"without {of_experts[0]}, as servers load no adapters of experts: the embedded engine does"
        raise ConfigError("lora.targets", lora.targets, wanted)
    # On the file system of the snapshots no adapter is copied.
    config = replace(config, staging=config.staging or str((root / "adapters").absolute()))
    given: dict[str, Any] = {
        "model": directory.absolute(),
        "logs": (root / "logs").absolute(),
        "report": report,
        "kept": True,  # the most likely tokens are those that top-k keeps
        "room": room,
    }
    if isinstance(config, SGLangConfig):
        from areal_x.engines.sglang.engine import SGLangEngine

        return SGLangEngine(config, **given)
    from areal_x.engines.vllm.engine import VLLMEngine

    assert isinstance(config, VLLMConfig)
    return VLLMEngine(config, **given)
