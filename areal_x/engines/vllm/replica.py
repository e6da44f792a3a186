"""One server as a run uses it: its process if the run started it, its client, and its weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_x.engines.vllm import adapters
from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm.client import HEALTH_SECONDS, VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.failures import ServerFailed, ServerLost, ServerTorn
from areal_x.engines.vllm.installed import default_threads
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.staging import StagedFiles
from areal_x.engines.vllm.transports import TRANSPORTS
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.runtime.waits import on_behalf_of, waiting


@dataclass(frozen=True)
class ExternalServer:
    """A server that the run did not start."""

    url: str
    key: str | None
    transfer: str


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
        self._client: VLLMClient | None = None
        self._staging_root = Path()

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
    def client(self) -> VLLMClient:
        assert self._client is not None, f"{self.name} was not opened"
        return self._client

    async def open(self, timeout_seconds: float, report: Callable[[str], None]) -> None:
        """Returns when the server responds. A server of ours is started, after its last process has
        ended.

        Raises: UserError with the reason if it dies at start or takes too long.
        """
        await self.close()
        if isinstance(self.origin, ExternalServer):
            self._client = VLLMClient(self.origin.url, self.origin.key, self.origin.transfer)
            return
        launch = replace(self.origin, seed=next(self._seeds))
        with on_behalf_of(self.name):
            self.server = await self._starter.start(self.number, launch)
        await servers.wait_until_ready(self.server, self.name, timeout_seconds, report)
        self._client = VLLMClient(self.server.url, self.server.key, self.origin.transfer)

    async def prepare(self, staging_root: Path, transport: str, lora: bool) -> tuple[int, int]:
        """Prepares the server to be given weights; those that it has become version 0. Returns its
        context, and its number of workers if a broadcast needs it.

        Raises: UserError if the server is paused and will not get whole weights from files: it may
        have parts of two policies.
        """
        client, workers = self.client, 0
        context = await client.context()
        self._staging_root = staging_root
        if (transport != "files" or lora) and await client.is_paused():
            cause = (
                "a run that was killed, or an update that broke off, may have left it with parts of"
                " two policies"
            )
            raise UserError(f"{self.name} is paused: {cause}; restart it")
        if transport == "files":
            # A paused server stays paused until it has whole weights: see `load`.
            await client.init_weight_transfer({"staging_root": str(staging_root)})
        else:
            await client.end_weight_transfer()  # of an earlier run
            workers = await client.workers()
        await client.set_version(0)
        if lora:
            await self.sync_adapters([])  # it may have those of another run
        return context, workers

    async def load(self, staged: StagedFiles) -> float:
        """Loads staged weights and returns the seconds that the server was paused.

        Raises: ServerTorn if the update broke off in the middle; the server then stays paused, as
        it has parts of two policies. After any other EngineError it goes on with its old weights.
        """
        client, changing = self.client, False
        await client.validate_folder(self._staging_root, staged.folder)
        began = time.perf_counter()
        try:
            await client.pause()
            await self.start_update()
            changing = True
            await client.update_weights({"folder": str(staged.folder)})
            await client.finish_update(str(staged.version))
        except BaseException as error:
            if not changing and not isinstance(error, ServerLost):
                with contextlib.suppress(Exception):
                    await client.resume(HEALTH_SECONDS)
            if changing and isinstance(error, EngineError) and not isinstance(error, ServerLost):
                raise ServerTorn(f"{error}; it stays paused until it has whole weights") from error
            raise
        await client.resume()
        return time.perf_counter() - began

    async def start_update(self) -> None:
        """Begins an update of the paused server."""
        try:
            await self.client.start_update()
        except ServerFailed:
            # An update that broke off is still open: of a run that was killed, or in some workers.
            await self.client.abandon_update()
            await self.client.start_update()

    async def sync_adapters(self, versions: Sequence[StagedFiles]) -> None:
        """Loads and unloads adapters until the server has exactly these."""
        wanted = {adapters.name_of(staged.version): staged.folder for staged in versions}
        held = set(await self.client.adapters())
        for name in held - wanted.keys():
            await self.client.unload_adapter(name)
        for name in wanted.keys() - held:
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
        client, self._client = self._client, None
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


def external_replica(url: str, key: str | None, transfer: str = BACKEND) -> Replica:
    return Replica(
        f"the vLLM server at {url.rstrip('/')}",
        ExternalServer(url, key, transfer),
        itertools.count(),
    )


def launch_of(
    config: VLLMConfig,
    number: int,
    *,
    model: Path,
    log: Path,
    staging_root: Path,
    context: int,
    lora_rank: int,
    experts: bool,
) -> servers.Launch:
    """Returns the launch configuration of a server that the run starts. number: the server's."""
    return servers.Launch(
        model=model,
        log=log,
        staging=staging_root,
        context=context,
        concurrency=config.concurrency,
        seed=number,
        port=config.port + number if config.port else 0,
        threads=config.threads or default_threads(config.servers),
        device=config.devices[number] if config.devices else None,
        experts=experts,
        lora_rank=lora_rank,
        transfer=TRANSPORTS[config.transport],
        metrics=config.adaptive,
        arguments=config.arguments,
    )
