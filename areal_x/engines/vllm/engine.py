"""The engine over vLLM servers: started here on loopback ports, or given by their URLs.

Every request that entered is answered, whichever servers are lost meanwhile, and every token has
one true version: what a server was drawing when it was lost is drawn again elsewhere, and a server
that comes back serves once it holds the newest weights and says of a known prompt what the others
say. Which servers serve is decided in `fleet`, and seen to in `supervisor`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.vllm import adapters, slices
from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm.adapters import AdapterVersions
from areal_x.engines.vllm.client import MODEL, VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.failures import ServerFailed, ServerLost, ServerRestarted, ServerTorn
from areal_x.engines.vllm.features import features_for
from areal_x.engines.vllm.gate import unprotected_warning
from areal_x.engines.vllm.gpu_transfer import TRANSPORTS, GPUSender, TrainerWeights, check_machine
from areal_x.engines.vllm.probe import probe_prompt, trainer_logp
from areal_x.engines.vllm.replica import Replica, external_replica, launches_of
from areal_x.engines.vllm.routing import Prefixes
from areal_x.engines.vllm.staging import NoRoom, StagedFiles, Staging, default_parent
from areal_x.engines.vllm.supervisor import Supervisor
from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters as adapter_files
from areal_x.hf.model_dir import read_config, text_config
from areal_x.protocols.engine import (
    Completion,
    Engine,
    EngineError,
    Request,
    SamplingParams,
    max_new_tokens,
)
from areal_x.protocols.trainer import Scorer
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.runtime import open_files, timeline
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose

T = TypeVar("T")
ATTEMPTS = 10  # of one slice: what ten servers in a row fail at is not their fault
# of vllm.concurrency: how many requests more a server may have that knows the prompt's beginning
SLACK = 1 / 8
FULL_SECONDS = 1.0  # between two looks at a full file system


class VLLMEngine(Engine):
    """Engine over vLLM servers (areal_x.protocols.engine.Engine).

    A completion's log-probabilities are of the distribution after temperature, top-k and top-p; a
    greedy one's (temperature 0) are of the plain softmax. Request.seed is not honoured: see
    VLLMClient.generate.

    model: the directory that servers load at their start; weights published later replace it. logs:
    where server logs go. report: shown to the user while servers start. lora: where the trainer has
    adapters, they are published and not whole weights: a swap stops nothing then, and a request
    ends on the version that it began on. experts: whether completions say which experts of a
    mixture each token went through. scorer: says what servers should say of a known prompt when
    weights are staged; None where nothing does.
    """

    def __init__(
        self,
        config: VLLMConfig,
        model: Path,
        logs: Path,
        report: Callable[[str], None] = print,
        lora: LoRAConfig | None = None,
        experts: bool = False,
        scorer: Scorer | None = None,
    ) -> None:
        self.config = config
        self.experts, self.scorer = experts, scorer
        self.model = model
        self.logs = logs
        self.report = report
        self.context = config.context or model_context(model)
        self.concurrency = config.concurrency * (len(config.urls) or config.servers)
        self.version = 0
        self.lora = lora if lora is not None and lora.rank else None
        self.supervisor = Supervisor(
            config, report, self._prepare, self._load_current, self._score, self._changed
        )
        self.fleet = self.supervisor.fleet
        self._staging: Staging | None = None
        self._current: StagedFiles | None = None  # what a server that comes back is given
        self._versions = AdapterVersions()
        self._gpu_sender: GPUSender | None = None  # where weights go without files
        self._workers: dict[str, int] = {}  # of each server, where weights go so
        self._prefixes = Prefixes()
        self._requests, self._seeds = itertools.count(), itertools.count()
        self._change = asyncio.Event()
        check_machine(config)
        if self.lora is not None:
            adapters.arguments(self.lora.rank)  # refuses a rank that no server has room for

    # ---- start and end

    async def start(self) -> None:
        atexit.register(self._end_processes)
        try:
            if few := open_files.enough_for(self.concurrency):
                self.report(few)
            self._staging = Staging(
                Path(self.config.staging).resolve() if self.config.staging else default_parent()
            )
            for replica in self._replicas(self._staging.root):
                self.supervisor.add(replica)
            try:
                await together(
                    self.supervisor.bring_up(name) for name in self.fleet.due(time.monotonic())
                )
            except EngineError as error:
                raise UserError(f"{error}") from error
            if self.config.transport == "files":
                self.supervisor.watch()
            else:
                sizes = [self._workers[name] for name in self.supervisor.replicas]
                self._gpu_sender = GPUSender(self.config, self._clients, sizes, self._explain)
        except BaseException:
            await self.close()
            raise

    def _replicas(self, staging_root: Path) -> list[Replica]:
        if self.config.urls:
            key = os.environ.get(self.config.key_variable)
            return [
                external_replica(url, key, TRANSPORTS[self.config.transport])
                for url in self.config.urls
            ]
        rank = self.lora.rank if self.lora else 0
        launches = launches_of(
            self.config, self.model, self.logs, staging_root, self.context, rank, self.experts
        )
        names = (f"vLLM server {index + 1} of {len(launches)}" for index in range(len(launches)))
        return [
            Replica(name, launch, self._seeds) for name, launch in zip(names, launches, strict=True)
        ]

    async def close(self) -> None:
        if self._gpu_sender is not None:
            with waiting(whose(), "the sending of weights to end"):
                await asyncio.to_thread(self._gpu_sender.close)
            self._gpu_sender = None
        await self.supervisor.close()
        for replica in self.supervisor.replicas.values():
            await replica.disconnect()
        with waiting(whose(), "the vLLM servers to end"):
            await asyncio.to_thread(self._end_processes)
        atexit.unregister(self._end_processes)

    def _end_processes(self) -> None:
        ended = self._servers
        for replica in self.supervisor.replicas.values():
            replica.server = None
        for server in ended:
            with contextlib.suppress(ProcessLookupError):
                server.process.terminate()  # all at once, then each is waited for
        for server in ended:
            server.stop()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    @property
    def _servers(self) -> list[servers.Server]:
        return [
            replica.server
            for replica in self.supervisor.replicas.values()
            if replica.server is not None
        ]

    def chat_servers(self) -> list[VLLMClient]:
        """Of the servers that serve now."""
        return [self.supervisor.replicas[name].client for name in self.fleet.serving()]

    @property
    def _clients(self) -> list[VLLMClient]:
        return [replica.client for replica in self.supervisor.replicas.values()]

    async def join(self, url: str) -> None:
        """A server that runs already takes part from now on, with the newest weights, once it says
        what the others say.

        Raises: UserError where it cannot.
        """
        replica = external_replica(
            url, os.environ.get(self.config.key_variable), TRANSPORTS[self.config.transport]
        )
        if self.config.transport != "files" or (
            not self.config.staging and not servers.is_local(url)
        ):
            raise UserError(
                f"{replica.name} cannot join: it needs vllm.transport = 'files' and a vllm.staging"
                " that it sees"
            )
        if replica.name in self.supervisor.replicas:
            raise UserError(f"{replica.name} takes part already")
        self.supervisor.add(replica)
        self.fleet.due(time.monotonic())
        try:
            await self.supervisor.bring_up(replica.name)
        except BaseException as error:
            await self.supervisor.remove(replica.name)
            if isinstance(error, EngineError):
                raise UserError(f"{replica.name} cannot join: {error}") from error
            raise

    async def leave(self, url: str) -> None:
        """A server takes part no more: its requests go to others, and it may be ended as soon as
        this returns.

        Raises: UserError where no server has this address.
        """
        for name, replica in self.supervisor.replicas.items():
            if url.rstrip("/") in (replica.url, name):
                return await self.supervisor.remove(name)
        raise UserError(
            f"no server at {url} takes part: those that do are"
            f" {', '.join(self.supervisor.replicas)}"
        )

    # ---- tokens

    async def generate(self, request: Request) -> Completion:
        most = max_new_tokens(
            request, self.context, "train.row_length (and vllm.context, where it is set)"
        )
        features = (
            None
            if request.images is None
            else features_for(self.model, request.tokens, request.images)
        )
        with self._versions.request() as adapter:
            name = MODEL if adapter is None else adapters.name_of(adapter.version)
            parts: list[Completion] = []
            while not parts or not slices.ended(parts, most):
                length = slices.next_length(
                    sum(len(part.tokens) for part in parts), most, self.config.slice_tokens
                )
                sampling = replace(request.sampling, max_tokens=length)
                context = slices.context_of(request.tokens, parts)
                parts.append(await self._draw(context, sampling, name, request.stop, features))
            said = slices.joined(parts)
            if adapter is None:
                return said
            return replace(said, versions=np.full(len(said.tokens), adapter.version, np.int32))

    async def _draw(
        self,
        tokens: Int32[np.ndarray, " P"],
        sampling: SamplingParams,
        model: str,
        stop: tuple[str, ...],
        features: dict[str, Any] | None,
    ) -> Completion:
        """From whichever server answers; as much as one was drawing when it was lost is drawn again
        by another."""
        request = next(self._requests)
        self.fleet.enter(request)
        try:
            for attempt in itertools.count(1):
                server = await self._place(request, tokens)
                if server not in self.fleet.members:  # it left before this could go on
                    continue
                least = self.fleet.members[server].version
                replica = self.supervisor.replicas[server]
                call = replica.client.generate(
                    tokens, sampling, model, self.experts, stop, features
                )
                try:
                    said = await self.supervisor.unless_lost(
                        call, partial(self._is_at, request, server)
                    )
                    if (
                        model == MODEL
                        and least is not None
                        and said.versions.min(initial=least) < least
                    ):
                        raise ServerRestarted(
                            f"{server} drew with version {said.versions.min()}, where it was given"
                            f" {least}"
                        )
                    if said.finish_reason != "abort" and self.fleet.answered(
                        request, server, time.monotonic()
                    ):
                        self._prefixes.remember(np.concatenate([tokens, said.tokens]), server)
                        self._change.set()
                        return said
                    error: EngineError = ServerLost(f"{server} aborted a request that was wanted")
                except (ServerLost, ServerFailed) as raised:
                    error = raised
                except EngineError as raised:
                    raise replica.explained(raised) from raised
                self._failed(request, server, error, attempt)
            raise AssertionError("unreachable")
        finally:
            self.fleet.withdraw(request)
            self._change.set()

    def _failed(self, request: int, server: str, error: EngineError, attempt: int) -> None:
        """Raises EngineError where trying again would not help."""
        replica = self.supervisor.replicas.get(server)
        if self._gpu_sender is not None and replica is not None:
            lost = (
                f"{replica.explained(error)}; with vllm.transport = {self.config.transport!r} no"
                " server is started again"
            )
            raise EngineError(lost) from error
        if attempt == ATTEMPTS:
            raise EngineError(
                f"{ATTEMPTS} servers in a row failed at one request, the last one so: {error}"
            ) from error
        if isinstance(error, ServerRestarted) and self._is_at(request, server):
            self.fleet.lost(server, f"{error}", time.monotonic())
        died = replica.cause_of_death() if replica is not None else None
        if died and self._is_at(request, server):
            self.fleet.lost(server, died, time.monotonic())
        self.fleet.failed(request, server, f"{error}", time.monotonic())
        self.supervisor.settle()
        self.supervisor.wake()

    async def _place(self, request: int, tokens: Int32[np.ndarray, " P"]) -> str:
        """The server that the request is placed on, as soon as one takes it."""
        slack = int(self.config.concurrency * SLACK)
        while True:
            cached = self._prefixes.cached(tokens, self.fleet.serving())
            server = self.fleet.route(request, cached, slack, time.monotonic())
            if server is not None:
                self._prefixes.remember(tokens, server)
                return server
            if why := self.fleet.why_hopeless():
                raise EngineError(why)
            since = self.fleet.none_since
            if since is not None and time.monotonic() - since > self.config.wait_seconds:
                reasons = "; ".join(
                    f"{name}: {m.reason or m.state.value}" for name, m in self.fleet.members.items()
                )
                waited = f"no vLLM server was ready for {self.config.wait_seconds:g} s"
                raise EngineError(
                    f"{waited} ({reasons}): raise vllm.wait_seconds where they need longer"
                )
            self._change.clear()
            with waiting(whose(), "a vLLM server to take its request", self._states):
                await self._change.wait()

    def _states(self) -> str:
        members = self.fleet.members.copy().items()
        return "; ".join(
            f"{name}: {m.state.value}{f', {m.reason}' if m.reason else ''}" for name, m in members
        )

    def _is_at(self, request: int, server: str) -> bool:
        return self.fleet.placed.get(request) == server

    def _changed(self) -> None:
        limits = [
            m.limit or self.config.concurrency for m in self.fleet.members.values() if m.serves
        ]
        self.concurrency = sum(limits) or self.config.concurrency
        self._change.set()

    # ---- weights

    def stage(self, trainer: Any, version: int | None = None) -> StagedFiles | TrainerWeights:
        assert self._staging is not None, "stage() needs an engine that was started"
        version, config = trainer.version if version is None else version, self.lora
        if self._gpu_sender is not None:
            return self._gpu_sender.stage(trainer, version)
        if config is not None:
            write = partial(adapter_files.write, config=config, base=self.model)
            staged = self._with_room(
                lambda staging: staging.stage(trainer.adapter(), version, write)
            )
        else:
            staged = self._with_room(lambda staging: staging.stage(trainer.weights(), version))
        return (
            staged
            if self.scorer is None
            else replace(staged, probe_logp=trainer_logp(self.scorer, self._probe_prompt))
        )

    def _with_room(self, stage: Callable[[Staging], StagedFiles]) -> StagedFiles:
        """Where the file system is full and an earlier version had room: first without the version
        that is kept for servers that come back (they wait for the next one then), then again and
        again. (On the trainer's thread.)"""
        began = time.monotonic()
        for attempt in itertools.count():
            assert self._staging is not None
            try:
                return stage(self._staging)
            except NoRoom as error:
                if self._current is None or time.monotonic() - began > self.config.wait_seconds:
                    raise
                if attempt == 0 and self.lora is None:
                    self._staging.keep(None)
                    continue
                if attempt <= 1:
                    self.report(
                        f"{error}; staging is tried again for {self.config.wait_seconds:g} s"
                    )
                with waiting("the trainer", "room to stage weights", f"{error}"):
                    time.sleep(FULL_SECONDS)
        raise AssertionError("unreachable")

    async def swap(self, staged: StagedFiles | TrainerWeights) -> float:
        assert self._staging is not None, "swap() needs an engine that was started"
        if isinstance(staged, TrainerWeights):
            return await self._send(staged)
        await self.supervisor.pause_comparing()
        previous, self._current = self._current, staged
        self.supervisor.expect(staged.version, staged.probe_logp)
        names = self.fleet.begin(staged.version)
        if self.config.rolling:
            outcomes = [await self._update(name, staged) for name in names]
        else:
            outcomes = await together(self._update(name, staged) for name in names)
        errors = {
            name: x for name, x in zip(names, outcomes, strict=True) if isinstance(x, EngineError)
        }
        pauses = [x for x in outcomes if not isinstance(x, EngineError)]
        if (
            errors
            and not pauses
            and not any(isinstance(error, ServerLost) for error in errors.values())
        ):
            self._current = previous
            self.supervisor.expect(self.version, None if previous is None else previous.probe_logp)
            for name, error in errors.items():
                if isinstance(error, ServerTorn):
                    self.fleet.lost(name, f"{error}", time.monotonic())
            self.fleet.refused(time.monotonic())
            self.supervisor.settle()
            raise next(iter(errors.values()))
        for name, error in errors.items():
            self.fleet.lost(name, f"{error}", time.monotonic())
        self.version = staged.version
        self.fleet.published(time.monotonic())
        self.supervisor.settle()
        if self.lora is not None:
            await self._unload_adapters(self._versions.publish(staged))
        else:
            self._staging.keep(staged)
        self.supervisor.compare()
        return max(pauses, default=0.0)

    async def _update(self, name: str, staged: StagedFiles) -> float | EngineError:
        """The seconds that the server stood still, or why it does not have the version."""
        replica = self.supervisor.replicas.get(name)
        if replica is None:
            return ServerLost(f"{name} left during the swap")
        call = replica.load(staged) if self.lora is None else self._load_adapter(replica, staged)
        try:
            stood_still = await self.supervisor.unless_lost(
                call, lambda: name in self.fleet.serving()
            )
        except EngineError as error:
            return replica.explained(error)
        if stood_still:
            ended = time.perf_counter()
            timeline.add("pause", ended - stood_still, ended, version=staged.version, server=name)
        self._prefixes.forget(name)
        self.fleet.updated(name, time.monotonic())
        return stood_still

    async def _load_adapter(self, replica: Replica, staged: StagedFiles) -> float:
        """Beside those that requests are on."""
        await replica.client.load_adapter(adapters.name_of(staged.version), staged.folder)
        return 0.0

    async def _unload_adapters(self, unused: list[StagedFiles]) -> None:
        for old in unused:
            for name in self.fleet.serving():
                if (replica := self.supervisor.replicas.get(name)) is None:
                    continue  # it left while another was asked
                # it was started again meanwhile, and never had it
                with contextlib.suppress(EngineError):
                    await replica.client.unload_adapter(adapters.name_of(old.version))
            shutil.rmtree(old.folder, ignore_errors=True)

    async def _send(self, staged: TrainerWeights) -> float:
        """All servers together, as a broadcast has one sender. After an error they stay paused:
        what they hold then may be a part of two policies, and no token may come from that."""
        assert self._gpu_sender is not None
        await self._gpu_sender.connect(staged)
        began, clients = time.perf_counter(), self._clients
        try:
            await together(
                self._explain(index, client.pause()) for index, client in enumerate(clients)
            )
        except BaseException:
            for client in clients:
                with contextlib.suppress(Exception):
                    await client.resume()
            raise
        await self._gpu_sender.send(staged)
        for name in self.fleet.begin(staged.version):
            self.fleet.updated(name, time.monotonic())
            self._prefixes.forget(name)
        self.fleet.published(time.monotonic())
        await together(
            self._explain(index, client.resume()) for index, client in enumerate(clients)
        )
        self.version, ended = staged.version, time.perf_counter()
        timeline.add("pause", began, ended, version=staged.version)
        return ended - began

    async def _explain(self, index: int, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EngineError as error:
            raise list(self.supervisor.replicas.values())[index].explained(error) from error

    # ---- what the supervisor asks for

    async def _prepare(self, replica: Replica) -> None:
        assert self._staging is not None
        context, workers = await replica.prepare(
            self._staging.root, self.config.transport, self.lora is not None
        )
        if self._current is not None and context < self.context:
            raise UserError(
                f"its context is {context}, the run's is {self.context}: start it with"
                f" --max-model-len {self.context}"
            )
        if (
            not replica.ours
            and replica.name not in self._workers
            and await replica.client.accepts_without_key()
        ):
            self.report(unprotected_warning(replica.client.url))
        self.context = min(self.context, context)
        self._workers[replica.name] = workers
        self._prefixes.forget(replica.name)

    async def _load_current(self, replica: Replica) -> bool:
        if self._current is None:
            return False
        if self.lora is not None:
            await replica.sync_adapters([*self._versions.held(), self._current])
        else:
            with waiting(replica.name, "the next version to be staged"):
                while not self._current.folder.exists():  # see `_with_room`
                    self._change.clear()
                    await self._change.wait()
            await replica.load(self._current)
        return True

    async def _score(self, replica: Replica) -> Float32[np.ndarray, " T"]:
        model = (
            MODEL
            if self.lora is None or self._current is None
            else adapters.name_of(self._current.version)
        )
        return await replica.client.probe(model, self._probe_prompt.tolist())

    @property
    def _probe_prompt(self) -> Int32[np.ndarray, " T"]:
        return probe_prompt(self._vocabulary, self.context)

    @cached_property
    def _vocabulary(self) -> int:
        return int(text_config(read_config(self.model))["vocab_size"])


def model_context(model: Path) -> int:
    longest = text_config(read_config(model)).get("max_position_embeddings")
    if longest is None:
        raise ConfigError(
            "vllm.context",
            0,
            f"set: {model / 'config.json'} does not say how long a sequence may be",
        )
    return int(longest)
