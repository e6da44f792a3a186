"""The engine over vLLM servers: started here on loopback ports, or given by their URLs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import gin
import numpy as np

from areal_x import lora as adapter_files
from areal_x.errors import ConfigError, UserError, at_least, positive
from areal_x.model_dir import read_config, text_config
from areal_x.rollout.balance import Balance
from areal_x.rollout.engine import Completion, EngineError, Request, room
from areal_x.rollout.loop import together
from areal_x.rollout.publisher import Staged, Staging, default_parent
from areal_x.rollout.vllm import adapters
from areal_x.rollout.vllm import server as servers
from areal_x.rollout.vllm.adapters import Versions
from areal_x.rollout.vllm.client import MODEL, VLLMClient
from areal_x.rollout.vllm.direct import TRANSPORTS, Direct, Unstaged, check_machine, check_settings
from areal_x.trainer import LoRAConfig

T = TypeVar("T")


@gin.configurable("vllm")
@dataclass(frozen=True)
class VLLMConfig:
    """The servers that generate.

    servers: how many to start on this machine. urls: servers that run already (then none is started); the environment
    variable that key_variable names holds their API key. context: longest prompt and completion together, in tokens; 0 takes
    train.row_length. concurrency: requests that one server works on at once. port: of the first server, the next ones count
    up; 0 takes free ports. threads: compute threads of a server on a CPU; 0 shares half the cores. devices: the GPUs or
    NPUs that each server sees, as "0" or "0,1"; none for all. staging: the folder that weights pass through, which every
    server must see under the same path; '' is shared memory. arguments: more words for the server's command line.
    start_timeout_seconds: how long a start may take.
    transport: how weights reach the servers. "files" through `staging`; the servers read while generation stands still. "nccl"
    from the GPU of a torch trainer to other GPUs (those of `devices`, or of `urls`), broadcast while generation stands still.
    "handles" to one server on the trainer's own GPU, which opens the trainer's memory. docs/torch.md tells more.
    allow_unpickling: accepts that a server started here unpickles what requests with its key hold, which "handles" needs.
    """

    servers: int = 1
    urls: tuple[str, ...] = ()
    key_variable: str = "VLLM_API_KEY"
    context: int = 0
    concurrency: int = 64
    port: int = 0
    threads: int = 0
    devices: tuple[str, ...] = ()
    staging: str = ""
    arguments: tuple[str, ...] = ()
    start_timeout_seconds: float = 600.0
    transport: str = "files"
    allow_unpickling: bool = False

    def __post_init__(self) -> None:
        positive("vllm.servers", self.servers)
        at_least("vllm.context", self.context, 0)
        positive("vllm.concurrency", self.concurrency)
        at_least("vllm.port", self.port, 0)
        at_least("vllm.threads", self.threads, 0)
        positive("vllm.start_timeout_seconds", self.start_timeout_seconds)
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError("vllm.devices", self.devices, f"empty, or one entry for each of the {self.servers} servers")
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError("vllm.urls", self.urls, f"http:// or https:// addresses ({url!r} is none)")
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError("vllm.urls", self.urls, "each server once: one that were updated twice at a time would break")
        check_settings(self)
        far = [url for url in self.urls if not servers.is_local(url)]
        if far and not self.staging and self.transport == "files":
            wanted = f"a folder that {far[0]} sees under the same path: shared memory ends at this machine"
            raise ConfigError("vllm.staging", self.staging, wanted)


class VLLMEngine:
    """Engine over vLLM servers (areal_x.rollout.engine.Engine).

    A completion's log-probabilities are of the distribution after temperature, top-k and top-p; a greedy one's (temperature 0)
    are of the plain softmax. Request.seed is not honoured: see VLLMClient.generate.

    model: the directory that servers load at their start; weights published later replace it. logs: where server logs go.
    report: shown to the user while servers start. lora: where the trainer has adapters, they are published and not whole
    weights: a swap stops nothing then, and a request ends on the version that it began on. experts: whether completions say
    which experts of a mixture each token went through.
    """

    def __init__(
        self,
        config: VLLMConfig,
        model: Path,
        logs: Path,
        report: Callable[[str], None] = print,
        lora: LoRAConfig | None = None,
        experts: bool = False,
    ) -> None:
        self.config = config
        self.experts = experts
        self.model = model
        self.logs = logs
        self.report = report
        self.context = config.context or model_context(model)
        self.concurrency = config.concurrency * (len(config.urls) or config.servers)
        self.version = 0
        self._servers: list[servers.Server] = []
        self._clients: list[VLLMClient] = []
        self._balance = Balance(0)
        self._staging: Staging | None = None
        self.lora = lora if lora is not None and lora.rank else None
        self._versions = Versions()
        self._direct: Direct | None = None  # where weights go without files
        check_machine(config)
        if self.lora is not None:
            adapters.arguments(self.lora.rank)  # refuses a rank that no server has room for

    async def start(self) -> None:
        atexit.register(self._end_processes)
        try:
            self._staging = Staging(Path(self.config.staging).resolve() if self.config.staging else default_parent())
            if self.config.urls:
                key = os.environ.get(self.config.key_variable)
                self._clients = [VLLMClient(url, key, TRANSPORTS[self.config.transport]) for url in self.config.urls]
            else:
                await self._start_servers(self._staging)
            self._balance = Balance(len(self._clients))
            sizes = await together(self._prepare(client, self._staging) for client in self._clients)
            if self.config.transport != "files":
                self._direct = Direct(self.config, self._clients, sizes, self._explaining)
        except BaseException:
            await self.close()
            raise

    async def _start_servers(self, staging: Staging) -> None:
        config = self.config
        for index in range(config.servers):
            launch = servers.Launch(
                model=self.model,
                log=self.logs / f"vllm-{index}.log",
                staging=staging.root,
                context=self.context,
                concurrency=config.concurrency,
                seed=index,
                port=config.port + index if config.port else 0,
                threads=config.threads or servers.default_threads(config.servers),
                device=config.devices[index] if config.devices else None,
                experts=self.experts,
                lora_rank=self.lora.rank if self.lora else 0,
                transfer=TRANSPORTS[config.transport],
                arguments=config.arguments,
            )
            self._servers.append(servers.start(launch))
        names = [f"vLLM server {index + 1} of {config.servers}" for index in range(config.servers)]
        seconds, report = config.start_timeout_seconds, self.report
        await together(servers.wait_until_ready(*pair, seconds, report) for pair in zip(self._servers, names, strict=True))
        self._clients = [VLLMClient(server.url, server.key) for server in self._servers]

    async def _prepare(self, client: VLLMClient, staging: Staging) -> int:
        """Returns how many workers the server has, where it must be known how many take part in a broadcast."""
        workers = 0
        try:
            self.context = min(self.context, await client.context())
            if self.config.transport == "files":
                await client.init_weight_transfer({"staging_root": str(staging.root)})
            else:
                await client.end_weight_transfer()  # with the trainer of an earlier run
                workers = await client.workers()
            await client.set_version(self.version)
            if self.lora is not None:  # a server that runs already may hold those of another run
                for name in await client.adapters():
                    await client.unload_adapter(name)
        except EngineError as error:
            raise UserError(f"{error}") from error
        return workers

    async def generate(self, request: Request) -> Completion:
        sampling = replace(
            request.sampling, max_tokens=room(request, self.context, "train.row_length (and vllm.context, where it is set)")
        )
        index = self._balance.take()
        try:
            with self._versions.request() as adapter:
                name = MODEL if adapter is None else adapters.name_of(adapter.version)
                said = await self._clients[index].generate(request.tokens, sampling, name, self.experts)
                if adapter is None:
                    return said
                return replace(said, versions=np.full(len(said.tokens), adapter.version, np.int32))
        except EngineError as error:
            raise self._explained(index, error) from error
        finally:
            self._balance.give_back(index)

    def stage(self, trainer: Any, version: int | None = None) -> Staged | Unstaged:
        assert self._staging is not None, "stage() needs an engine that was started"
        version, config = trainer.version if version is None else version, self.lora
        if self._direct is not None:
            return self._direct.stage(trainer, version)
        if config is None:
            return self._staging.stage(trainer.weights(), version)
        return self._staging.stage(trainer.adapter(), version, partial(adapter_files.write, config=config, base=self.model))

    async def swap(self, staged: Staged | Unstaged) -> float:
        assert self._staging is not None, "swap() needs an engine that was started"
        if isinstance(staged, Unstaged):
            return await self._send(staged)
        if self.lora is not None:
            await self._swap_adapter(staged)
            return 0.0
        pauses = await together(self._swap(index, staged) for index in range(len(self._clients)))
        self.version = staged.version
        self._staging.remove(staged)
        return max(pauses)

    async def _swap(self, index: int, staged: Staged) -> float:
        client = self._clients[index]
        try:
            began = time.perf_counter()
            try:
                await client.pause()
                await client.start_update()
                await client.receive({"folder": str(staged.folder)})
                await client.finish_update(str(staged.version))
            except BaseException:
                with contextlib.suppress(Exception):
                    await client.resume()
                raise
            await client.resume()
            return time.perf_counter() - began
        except EngineError as error:
            raise self._explained(index, error) from error

    async def _send(self, unstaged: Unstaged) -> float:
        """All servers together, as a broadcast has one sender. After an error they stay paused: what they hold then may be a
        part of two policies, and no token may come from that."""
        assert self._direct is not None
        await self._direct.meet(unstaged)
        began = time.perf_counter()
        try:
            await together(self._explaining(index, client.pause()) for index, client in enumerate(self._clients))
        except BaseException:
            for client in self._clients:
                with contextlib.suppress(Exception):
                    await client.resume()
            raise
        await self._direct.send(unstaged)
        await together(self._explaining(index, client.resume()) for index, client in enumerate(self._clients))
        self.version = unstaged.version
        return time.perf_counter() - began

    async def _swap_adapter(self, staged: Staged) -> None:
        """Loads it beside those that requests are on, and unloads those that none is on any more."""
        servers, name = range(len(self._clients)), adapters.name_of(staged.version)
        await together(self._explaining(index, self._clients[index].load_adapter(name, staged.folder)) for index in servers)
        self.version = staged.version
        for old in self._versions.publish(staged):
            name = adapters.name_of(old.version)
            await together(self._explaining(index, self._clients[index].unload_adapter(name)) for index in servers)
            shutil.rmtree(old.folder, ignore_errors=True)

    async def close(self) -> None:
        if self._direct is not None:
            await asyncio.to_thread(self._direct.close)
            self._direct = None
        clients, self._clients = self._clients, []
        for client in clients:
            await client.close()
        await asyncio.to_thread(self._end_processes)
        atexit.unregister(self._end_processes)

    def _end_processes(self) -> None:
        ended, self._servers = self._servers, []
        for server in ended:
            with contextlib.suppress(ProcessLookupError):
                server.process.terminate()  # all at once, then each is waited for
        for server in ended:
            server.stop()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    async def _explaining(self, index: int, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EngineError as error:
            raise self._explained(index, error) from error

    def _explained(self, index: int, error: EngineError) -> EngineError:
        """The error with the last one in the server's log, where the server is ours."""
        if index >= len(self._servers):
            return error
        server = self._servers[index]
        return EngineError(f"{error}; its log ends with: {server.last_words()} (log: {server.log})")


def model_context(model: Path) -> int:
    longest = text_config(read_config(model)).get("max_position_embeddings")
    if longest is None:
        raise ConfigError("vllm.context", 0, f"set: {model / 'config.json'} does not say how long a sequence may be")
    return int(longest)
