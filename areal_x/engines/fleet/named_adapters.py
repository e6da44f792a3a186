"""Adapters of many models on the servers of one base, each under a name that requests give.

    add       links an adapter's files to where servers read them, under a name that none ever had
    answer    loads it into the server of a request, unless that has it
    remove    unloads it from all servers, and removes the files

A name never stands for other weights than at first, so that no cached block, no restart and no request
that comes late can mix two versions. A server that is started again has another client, and has loaded
nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from areal_x.engines.fleet.client import Client
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.failures import ServerFailed, ServerLost, ServerRefused, ServerRestarted
from areal_x.engines.fleet.replica import Replica
from areal_x.engines.fleet.staging import link_or_copy
from areal_x.errors import ConfigError
from areal_x.hf.adapters import CONFIG, WEIGHTS
from areal_x.protocols.engine import EngineError
from areal_x.runtime import background

T = TypeVar("T")


@dataclass(frozen=True)
class AdapterRoom:
    """The adapters that servers have room for. rank: the largest. batched: how many may be in one
    batch; 0 takes the program's default."""

    rank: int
    batched: int = 0


def check_room(config: FleetConfig, room: AdapterRoom | None) -> None:
    """Raises: ConfigError for servers that get weights in another way than files."""
    if room is not None and config.direct:
        wanted = "'files' with adapters, which are small and load without a pause"
        raise ConfigError(f"{config.binding}.transport", config.transport, wanted)


class NamedAdapters:
    """The adapters of an engine's servers. Used on one event loop, but for `add`."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        # Those that each server has loaded or is loading, by its client.
        self._loads: WeakKeyDictionary[Client, dict[str, asyncio.Future[None]]]
        self._loads = WeakKeyDictionary()

    def add(self, root: Path, directory: Path) -> str:
        """Takes an adapter in PEFT's form out of a directory, whose files may be removed or replaced
        afterwards, but not rewritten. Returns its name. root: a folder that all servers see.

        Raises: OSError if the directory has no adapter.
        """
        name = f"adapter-{uuid.uuid4().hex}"
        folder = root / name
        folder.mkdir()
        try:
            for file in (CONFIG, WEIGHTS):
                link_or_copy(str(directory / file), str(folder / file))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folders[name] = folder
        return name

    def __contains__(self, name: str) -> bool:
        return name in self._folders

    async def answer(self, replica: Replica, model: str, request: Callable[[], Awaitable[T]]) -> T:
        """Returns a server's answer to a request, before which the server gets the adapter that it
        names, if it names one.

        Raises: what the request raises; EngineError if the server cannot load the adapter; ServerLost
        if it does not respond any more; ServerRestarted if it has lost an adapter that it had.
        """
        if model not in self._folders:
            return await request()
        await self._ensure(replica, model)
        try:
            return await request()
        except ServerRefused as error:
            if model in await replica.client.adapters():
                raise
            raise ServerRestarted(f"{replica.name} has lost its adapters: {error}") from error

    async def _ensure(self, replica: Replica, name: str) -> None:
        loads = self._loads.setdefault(replica.client, {})
        if name not in loads:
            loads[name] = asyncio.get_running_loop().create_future()
            # It goes on if this request is cancelled, as others may wait for it.
            background.start(self._load(replica, loads, name), f"an adapter for {replica.name}")
        await asyncio.shield(loads[name])

    async def _load(
        self, replica: Replica, loads: dict[str, asyncio.Future[None]], name: str
    ) -> None:
        loaded = loads[name]
        try:
            await load(replica, name, self._folders[name])
        except Exception as error:
            loads.pop(name, None)  # the next request tries again
            loaded.set_exception(error)
            loaded.exception()  # perhaps nobody waits for it any more
        else:
            loaded.set_result(None)

    async def remove(self, name: str, replicas: Iterable[Replica]) -> None:
        """Forgets an adapter that no request has. replicas: those that serve."""
        if (folder := self._folders.pop(name, None)) is None:
            return
        for replica in replicas:
            loaded = self._loads.get(replica.client, {}).pop(name, None)
            if loaded is not None:
                with suppress(EngineError):
                    await loaded
                    await replica.client.unload_adapter(name)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def load(replica: Replica, name: str, folder: Path) -> None:
    """Raises: EngineError for an adapter that the server cannot load; ServerLost."""
    client = replica.client
    try:
        await client.load_adapter(name, folder)
    except ServerRefused:
        if name not in await client.adapters():  # else it was loaded, and the answer was lost
            raise
    except ServerFailed as error:
        if not await client.is_healthy():
            raise ServerLost(f"{error}") from error
        # A sound server refuses so what it cannot compute, and so would any other.
        raise EngineError(f"{replica.name} cannot load the adapter: {error}") from error
