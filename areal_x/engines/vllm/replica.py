"""One server as a run deals with it: its process where it is ours, the client that speaks to it,
the weights it is given."""

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
from areal_x.engines.vllm.gpu_transfer import TRANSPORTS
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.staging import StagedFiles
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.runtime.waits import waiting


@dataclass(frozen=True)
class ExternalServer:
    """A server that runs already."""

    url: str
    key: str | None
    transfer: str


class Replica:
    """seeds: each start takes the next one, as a server that began again with its old one would
    draw the same samples again."""

    def __init__(
        self, name: str, origin: servers.Launch | ExternalServer, seeds: Iterator[int]
    ) -> None:
        self.name, self.origin, self._seeds = name, origin, seeds
        self.server: servers.Server | None = None
        self._client: VLLMClient | None = None
        self._staging_root = Path()

    @property
    def ours(self) -> bool:
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
        """It answers when this returns. One of ours is started, after whatever is left of its last
        process has gone.

        Raises: UserError with the reason when it dies at its start or takes too long.
        """
        await self.close()
        if isinstance(self.origin, ExternalServer):
            self._client = VLLMClient(self.origin.url, self.origin.key, self.origin.transfer)
            return
        self.server = servers.start(replace(self.origin, seed=next(self._seeds)))
        await servers.wait_until_ready(self.server, self.name, timeout_seconds, report)
        self._client = VLLMClient(self.server.url, self.server.key, self.origin.transfer)

    async def prepare(self, staging_root: Path, transport: str, lora: bool) -> tuple[int, int]:
        """Makes it ready to be given weights; those that it holds are called version 0. Returns its
        context, and its workers where it must be known how many take part in a broadcast.

        Raises: UserError for one that is paused where no whole weights will come from files: it may
        hold parts of two policies.
        """
        client, workers = self.client, 0
        context = await client.context()
        self._staging_root = staging_root
        if (transport != "files" or lora) and await client.is_paused():
            cause = (
                "a run that was killed, or an update that broke off, may have left it with parts of"
                " two policies"
            )
            raise UserError(f"{self.name} is paused: {cause}; start it again")
        if transport == "files":
            # One that is paused stays so until it has whole weights: see `load`.
            await client.init_weight_transfer({"staging_root": str(staging_root)})
        else:
            await client.end_weight_transfer()  # with the trainer of an earlier run
            workers = await client.workers()
        await client.set_version(0)
        if lora:
            await self.sync_adapters([])  # it may hold those of another run
        return context, workers

    async def load(self, staged: StagedFiles) -> float:
        """Swaps its weights; returns the seconds that it stood still.

        Raises: ServerTorn when the update broke off in the middle, and the server stays paused, as
        it holds parts of two policies. After any other EngineError it goes on with the weights that
        it had.
        """
        client, changing = self.client, False
        await client.validate_folder(self._staging_root, staged.folder)
        began = time.perf_counter()
        try:
            await client.pause()
            await self._start_update()
            changing = True
            await client.update_weights({"folder": str(staged.folder)})
            await client.finish_update(str(staged.version))
        except BaseException as error:
            if not changing and not isinstance(error, ServerLost):
                with contextlib.suppress(Exception):
                    await client.resume(HEALTH_SECONDS)
            if changing and isinstance(error, EngineError) and not isinstance(error, ServerLost):
                raise ServerTorn(
                    f"{error}; it stays paused until it is given whole weights"
                ) from error
            raise
        await client.resume()
        return time.perf_counter() - began

    async def _start_update(self) -> None:
        try:
            await self.client.start_update()
        except (
            ServerFailed
        ):  # one that broke off is still open, of a run that was killed or in some of its workers
            await self.client.abandon_update()
            await self.client.start_update()

    async def sync_adapters(self, versions: Sequence[StagedFiles]) -> None:
        """Makes these adapters the ones that it has."""
        wanted = {adapters.name_of(staged.version): staged.folder for staged in versions}
        held = set(await self.client.adapters())
        for name in held - wanted.keys():
            await self.client.unload_adapter(name)
        for name in wanted.keys() - held:
            await self.client.load_adapter(name, wanted[name])

    def cause_of_death(self) -> str | None:
        """Why its process ended; None while it runs, and for one that is not ours."""
        if self.server is None or self.server.process.poll() is None:
            return None
        return f"it died: {self.server.failure_reason()} (log: {self.server.log})"

    def explained(self, error: EngineError) -> EngineError:
        """The error with the last one in the server's log, where the server is ours."""
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
        """Lets go of one that is not ours; ends one that is."""
        await self.disconnect()
        if self.server is not None:
            with waiting(self.name, "its process to end", f"process {self.server.process.pid}"):
                await asyncio.to_thread(self.server.stop)
            self.server = None


def external_replica(url: str, key: str | None, transfer: str = BACKEND) -> Replica:
    return Replica(
        f"the vLLM server at {url.rstrip('/')}",
        ExternalServer(url, key, transfer),
        itertools.count(),
    )


def launches_of(
    config: VLLMConfig,
    model: Path,
    logs: Path,
    staging_root: Path,
    context: int,
    lora_rank: int,
    experts: bool,
) -> list[servers.Launch]:
    """What the servers that the run starts are started with."""
    return [
        servers.Launch(
            model=model,
            log=logs / f"vllm-{index}.log",
            staging=staging_root,
            context=context,
            concurrency=config.concurrency,
            seed=index,
            port=config.port + index if config.port else 0,
            threads=config.threads or servers.default_threads(config.servers),
            device=config.devices[index] if config.devices else None,
            experts=experts,
            lora_rank=lora_rank,
            transfer=TRANSPORTS[config.transport],
            metrics=config.adaptive,
            arguments=config.arguments,
        )
        for index in range(config.servers)
    ]
