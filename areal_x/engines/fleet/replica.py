"""One server as a run uses it: its process if the run started it, its client, and its weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from areal_x.engines.fleet import adapters
from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.client import CACHES, HEALTH_SECONDS, WEIGHTS, Client
from areal_x.engines.fleet.failures import ServerFailed, ServerLost, ServerTorn
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError, Staged
from areal_x.runtime.waits import on_behalf_of, waiting

Prove = Callable[["Replica", StagedFiles], Awaitable[None]]
Place = tuple[Path, Path]
"""A folder with whole weights, and the one that it is below."""


class DirectSender(Protocol):
    """Sends weights to all servers together, from the trainer's own memory."""

    restarts: bool
    """True if servers may be lost, and started again."""

    def stage(self, trainer: Any, version: int) -> Staged: ...

    async def prepare(self, replica: Replica) -> None:
        """Prepares a server that responds to be sent weights."""
        ...

    async def publish(self, staged: Staged) -> float:
        """Returns when every server that is up has the weights, with the seconds that generation was
        paused."""
        ...

    async def joined(self, replica: Replica) -> bool:
        """Waits until a server that has come back has the weights. Returns False if none were sent
        so far."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExternalServer:
    """A server that the run did not start."""

    url: str
    connect: Callable[[], Client]
    """Returns a client of it, inside the event loop that uses it."""


class Replica:
    """One server of a run.

    seeds: each start takes the next one, as a restarted server with its old seed would repeat its
    samples. starter: starts it, by its number, if the run does.
    """

    def __init__(
        self,
        name: str,
        origin: servers.Launch | ExternalServer,
        seeds: Iterator[int],
        starter: servers.Starter | None = None,
        number: int = 0,
    ) -> None:
        self.name, self.origin, self._seeds = name, origin, seeds
        self.number = number
        self._starter = starter or servers.ThisMachine()
        self.server: servers.StartedServer | None = None
        self.asleep = False
        self._client: Client | None = None

    @property
    def ours(self) -> bool:
        """True if the run starts the server."""
        return isinstance(self.origin, servers.Launch)

    @property
    def url(self) -> str | None:
        if isinstance(self.origin, ExternalServer):
            return self.origin.url.rstrip("/")
        return self.server.url if self.server is not None else None

    @property
    def client(self) -> Client:
        assert self._client is not None, f"{self.name} was not opened"
        return self._client

    async def open(self, timeout_seconds: float, report: Callable[[str], None]) -> None:
        """Returns when the server responds. A server of ours is started, after its last process has
        ended.

        Raises: UserError with the reason if it dies at start or takes too long.
        """
        await self.close()
        if isinstance(self.origin, ExternalServer):
            self._client = self.origin.connect()
            return
        launch = replace(self.origin, seed=next(self._seeds))
        with on_behalf_of(self.name):
            self.server = await self._starter.start(self.number, launch)
        await servers.wait_until_ready(self.server, launch, self.name, timeout_seconds, report)
        self._client = launch.client(self.server.url, self.server.key)

    async def prepare(self, staging_root: Path, sender: DirectSender | None, lora: bool) -> int:
        """Prepares the server to be given weights; those that it has become version 0. Returns its
        context. sender: sends the weights; None if they come from files.

        Raises: UserError if the server is paused and will not get whole weights from files: it may
        have parts of two policies.
        """
        client = self.client
        await client.negotiate(self.ours)
        context = await client.context()
        if (sender is not None or lora) and await client.is_paused():
            cause = (
                "a run that was killed, or an update that broke off, may have left it with parts of"
                " two policies"
            )
            raise UserError(f"{self.name} is paused: {cause}; restart it")
        if sender is None:
            # A paused server stays paused until it has whole weights: see `load`.
            await client.init_weight_transfer({"staging_root": str(staging_root)})
        else:
            await sender.prepare(self)
        await client.set_version(0)
        if lora:
            await self.sync_adapters([])  # it may have those of another run
        return context

    async def load(
        self,
        staged: StagedFiles,
        prove: Prove,
        place: Callable[[Replica, StagedFiles], Awaitable[Place]],
    ) -> float:
        """Loads staged weights, into a server that sleeps too, and returns the seconds that it was
        paused, of which those asleep do not count. prove: is called before the server goes on, and
        raises WeightsDiffer if it has other weights. place: returns where the server is to read
        them.

        Raises: ServerTorn if the update broke off in the middle; the server then stays paused, as
        it has parts of two policies, and after WeightsDiffer. After any other EngineError it goes on
        with its old weights, or sleeps on.
        """
        client, changing = self.client, self.asleep
        root, folder = await place(self, staged)
        await client.validate_folder(root, folder)
        began = time.perf_counter()
        try:
            if self.asleep:
                await client.wake(WEIGHTS)
            else:
                await client.pause()
            await self.start_update()
            changing = True
            await client.update_weights({"folder": str(folder)})
            await client.finish_update(str(staged.version))
        except BaseException as error:
            if not changing and not isinstance(error, ServerLost):
                with contextlib.suppress(Exception):
                    await client.resume(HEALTH_SECONDS)
            if changing and isinstance(error, EngineError) and not isinstance(error, ServerLost):
                raise ServerTorn(f"{error}; it stays paused until it has whole weights") from error
            raise
        await prove(self, staged)
        if self.asleep:
            await client.wake(CACHES)
            self.asleep = False
        await client.resume()
        return time.perf_counter() - began

    async def sleep(self, keep_weights: bool) -> None:
        """Freezes the server's requests and releases its memory until `load`, or until `wake` if it
        keeps its weights on the host. Does nothing if it sleeps."""
        if not self.asleep:
            await self.client.sleep(keep_weights)
            self.asleep = True

    async def wake(self) -> None:
        """Wakes a server that has kept its weights; its requests go on. Does nothing if it is
        awake."""
        if self.asleep:
            for memory in (WEIGHTS, CACHES):
                await self.client.wake(memory)
            self.asleep = False
            await self.client.resume()

    async def start_update(self) -> None:
        """Begins an update of the paused server."""
        try:
            await self.client.start_update()
        except ServerFailed:
            # An update that broke off is still open: of a run that was killed, or in some workers.
            await self.client.abandon_update()
            await self.client.start_update()

    async def sync_adapters(self, versions: Sequence[StagedFiles]) -> None:
        """Loads and unloads adapters until the server has exactly these, the last of them loaded
        last."""
        wanted = {adapters.name_of(staged.version): staged.folder for staged in versions}
        held, newest = set(await self.client.adapters()), set(list(wanted)[-1:])
        for name in held - (wanted.keys() - newest):
            await self.client.unload_adapter(name)
        for name in wanted:
            if name not in held - newest:
                await self.client.load_adapter(name, wanted[name])

    def cause_of_death(self) -> str | None:
        """Returns why its process ended; None while it runs, and for a server that is not ours."""
        if self.server is None or self.server.poll() is None:
            return None
        return f"it died: {self.server.failure_reason()} (log: {self.server.log})"

    def explained(self, error: EngineError) -> EngineError:
        """Returns the error with the last error in the server's log, if the server is ours."""
        if self.server is None:
            return error
        return type(error)(
            f"{error}; its log ends with: {self.server.failure_reason()} (log: {self.server.log})"
        )

    async def disconnect(self) -> None:
        client, self._client, self.asleep = self._client, None, False
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Disconnects from the server, and ends it if it is ours."""
        await self.disconnect()
        if self.server is not None:
            with waiting(self.name, "its process to end", f"process {self.server.pid}"):
                await asyncio.to_thread(self.server.stop)
            self.server = None

    async def vacate(self) -> None:
        """Does `close`, and gives the server's room back if it is ours."""
        await self.close()
        if self.ours:
            await asyncio.to_thread(self._starter.vacate, self.number)
