"""The engine over servers, whatever program serves: started by the run, here on loopback ports or on
the nodes of a cluster, or given by their URLs.

Every request that entered is answered, whichever servers are lost meanwhile, and every token has
one true version: the tokens that a lost server was generating are generated again elsewhere, and a
server that returns serves once it has the newest weights and computes the same log-probabilities of
the probe prompt as the others.

    dispatcher    requests to servers            stager        weights from the trainer to files
    fleet         decides which servers serve    publisher     weights to servers
                                                 supervisor    starts, checks and restarts them
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.fleet import adapters, slices
from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.addresses import is_local
from areal_x.engines.fleet.client import MODEL, Client
from areal_x.engines.fleet.config import FleetConfig, default_threads
from areal_x.engines.fleet.dispatcher import Dispatcher
from areal_x.engines.fleet.elastic import Elastic
from areal_x.engines.fleet.named_adapters import AdapterRoom, NamedAdapters, check_room
from areal_x.engines.fleet.probe import probe_prompt
from areal_x.engines.fleet.publisher import Publisher
from areal_x.engines.fleet.quantised import check_quantised
from areal_x.engines.fleet.replica import DirectSender, ExternalServer, Replica
from areal_x.engines.fleet.speculation import check_draft
from areal_x.engines.fleet.stager import Stager
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.fleet.widths import check_model
from areal_x.errors import ConfigError, UserError
from areal_x.hf.config_defaults import described_text, vocabulary_of
from areal_x.protocols.engine import (
    Completion,
    Engine,
    EngineError,
    Request,
    SamplingParams,
    Staged,
    max_new_tokens,
)
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.protocols.trainer import Scorer
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.runtime import open_files
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose

C = TypeVar("C", bound=FleetConfig)


class FleetEngine(Engine, Generic[C]):
    """The engine over servers; each program's dialect is a subclass.

    A completion's log-probabilities are of the distribution after temperature, top-k and top-p; for
    greedy decoding (temperature 0) they are of the plain softmax. Request.seed is honoured with `room`
    alone, as far as the servers do.

    Args:
        model: directory of the model that servers load at their start; published weights replace
            it.
        logs: folder for the servers' logs.
        report: shows progress to the user while servers start.
        lora: if the trainer has adapters, they are published instead of whole weights: a swap then
            pauses nothing, and a request ends on the version that it began on.
        experts: completions contain the experts of a mixture that each token was routed to.
        kept: completions whose sampling truncates contain the tokens that it kept.
        scorer: computes the reference log-probabilities of the probe prompt when weights are
            staged; None skips the comparison with the trainer.
        starter: starts the run's servers, by default on this machine.
        trainer_here: the trainer is in this process.
        speculation: tokens that servers guess ahead.
        sleeps: the servers share the trainer's accelerators: see `sleep`.
        room: for adapters that requests name (`add_adapter`); the model then stays as the servers
            loaded it.
        first: number of the first server that it starts, among all of the run.
        seeds: each start of a server takes the next one, by default 0, 1, …
    """

    context_flag: ClassVar[str]
    """The server's argument that sets its context."""

    def __init__(
        self,
        config: C,
        model: Path,
        logs: Path,
        report: Callable[[str], None] = print,
        lora: LoRAConfig | None = None,
        experts: bool = False,
        scorer: Scorer | None = None,
        starter: servers.Starter | None = None,
        trainer_here: bool = True,
        first: int = 0,
        seeds: Iterator[int] | None = None,
        kept: bool = False,
        sleeps: bool = False,
        speculation: Speculation = NOTHING,
        room: AdapterRoom | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.logs = logs
        self.report = report
        self.experts = experts
        self.kept = kept
        self.sleeps = sleeps
        self.speculation = speculation
        self.context = config.context or model_context(model, config.binding)
        self.concurrency = config.requests
        self.version = 0
        self.lora = lora if lora is not None and lora.served_rank else None
        self.room = room or AdapterRoom(self.lora.rank if self.lora else 0)
        self.named = NamedAdapters()
        self._honours_seeds = room is not None
        self._base_expected = False
        self.supervisor = Supervisor(
            config,
            report,
            prepare=self._prepare,
            load=self._load_current,
            score=self._score,
            changed=self._changed,
        )
        self.fleet = self.supervisor.fleet
        self.dispatcher = Dispatcher(config, self.supervisor, experts, self.named)
        self.stager = Stager(
            config,
            model,
            lora=self.lora,
            scorer=scorer,
            probe_prompt=self._probe_prompt,
            report=report,
            prove_every=self.prove_every,
        )
        self.publisher = Publisher(
            config,
            self.stager,
            self.supervisor,
            self.dispatcher,
            lora=self.lora is not None,
            probe_prompt=self._probe_prompt,
            published=self._set_version,
            report=report,
        )
        self._starter = starter or servers.ThisMachine()
        self._seeds = itertools.count() if seeds is None else seeds
        self._first = first
        self.elastic = Elastic(config, self.supervisor, self._starter, self._own, report)
        self._warned: set[str] = set()  # servers whose protection was looked at
        self._check_widths()
        check_draft(speculation, model)
        check_quantised(config, bool(self.room.rank), model)
        check_room(config, room)
        self.check(trainer_here)

    def _check_widths(self) -> None:
        """Raises: ConfigError if the servers that it starts could not divide the model."""
        config = self.config
        if config.divides:
            described = described_text(self.model)
            check_model(config.kind, config.binding, config.widths, described)

    # ---- what each program's dialect adds

    @abstractmethod
    def check(self, trainer_here: bool) -> None:
        """Raises: ConfigError for what the program, or this machine, does not support."""

    @abstractmethod
    def launch(self, number: int) -> servers.Launch:
        """Returns how a server that the run starts is started, by its number: with
        `launch_settings`."""

    @abstractmethod
    def connect(self, url: str) -> Client:
        """Returns a client of a server that the run did not start."""

    @abstractmethod
    def unprotected_warning(self, url: str) -> str:
        """Returns a warning about a server that accepts control requests without a key."""

    @property
    def prove_every(self) -> int:
        """Publications from one proof in full to the next; 0 if servers prove nothing."""
        return 0

    def direct_sender(self) -> DirectSender | None:
        """Returns what sends weights to servers from the trainer's own memory; None for files."""
        return None

    def features(self, request: Request) -> dict[str, Any] | None:
        """Returns what a request sends of its images, beside its tokens."""
        if request.images is not None:
            raise UserError(
                f"{self.config.kind} servers get no images from this engine: train.engine = 'vllm'"
                " sends them"
            )
        return None

    # ---- start and end

    async def start(self) -> None:
        atexit.register(self._end_processes)
        try:
            if few := open_files.enough_for(self.concurrency):
                self.report(few)
            self.stager.open()
            with waiting(whose(), "the servers' model to be written"):
                await asyncio.to_thread(self.stager.write_served)
            self.publisher.sender = self.direct_sender()
            if self.config.urls:
                for url in self.config.urls:
                    self.supervisor.add(self._external(url))
            else:
                self.elastic.begin()
            try:
                await together(
                    self.supervisor.bring_up(name) for name in self.fleet.due(time.monotonic())
                )
            except EngineError as error:
                raise UserError(f"{error}") from error
            if self.publisher.sender is None or self.publisher.sender.restarts:
                self.supervisor.watch()
            if self.publisher.sender is None:
                self.elastic.watch()
        except BaseException:
            await self.close()
            raise

    def _own(self, number: int) -> Replica:
        """Returns a server that the run starts, by its number."""
        least, most = self.config.bounds
        of_all = f" of {most}" if least == most and number < most and not self._first else ""
        name = f"{self.config.kind} server {self._first + number + 1}{of_all}"
        return Replica(name, self.launch(number), self._seeds, self._starter, number)

    def launch_settings(self, number: int) -> dict[str, Any]:
        """Returns the fields that the launch of every program has. number: the server's."""
        config = self.config
        return {
            "model": self.stager.served_model,
            "log": self.logs / f"{config.binding}-{self._first + number}.log",
            "staging": self.stager.root,
            "context": self.context,
            "concurrency": config.concurrency,
            "seed": number,
            "port": config.port + number if config.port else 0,
            "threads": config.threads or default_threads(config.workers),
            "device": config.devices[number] if config.devices else None,
            "experts": self.experts,
            "kept": self.kept,
            "sleeps": self.sleeps,
            "lora_rank": self.room.rank,
            "lora_batched": self.room.batched,
            # Guesses are counted in the server's log.
            "metrics": config.adaptive or self.speculation.active,
            "speculation": self.speculation,
            "widths": config.widths,
            "arguments": config.arguments,
        }

    def _external(self, url: str) -> Replica:
        name = f"the {self.config.kind} server at {url.rstrip('/')}"
        return Replica(name, ExternalServer(url, partial(self.connect, url)), itertools.count())

    async def close(self) -> None:
        await self.elastic.close()
        await self.stager.close()
        await self.publisher.close()
        await self.supervisor.close()
        for replica in self.supervisor.replicas.values():
            await replica.disconnect()
        with waiting(whose(), "the servers to end"):
            await asyncio.to_thread(self._end_processes)
        atexit.unregister(self._end_processes)

    def _end_processes(self) -> None:
        ended = [] if self._starter.keeps else self._servers
        for replica in self.supervisor.replicas.values():
            replica.server = None
        servers.end_all(ended)
        self.stager.remove_files()

    @property
    def _servers(self) -> list[servers.StartedServer]:
        return [
            replica.server
            for replica in self.supervisor.replicas.values()
            if replica.server is not None
        ]

    @property
    def _clients(self) -> list[Client]:
        return [replica.client for replica in self.supervisor.replicas.values()]

    # ---- servers

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        self.elastic.step(trainer_idle, rollout_idle)
        return {"servers": len(self.fleet.serving()), **self.stager.metrics}

    async def join(self, url: str) -> None:
        """Adds a running server; it serves with the newest weights once it passes the checks.

        Raises: UserError if it cannot join.
        """
        replica = self._external(url)
        if self.sleeps:
            raise UserError(
                f"{replica.name} cannot join: with train.colocate = True servers take turns with the"
                " trainer, and the run starts all of them"
            )
        if self.config.direct or (not self.config.staging and not is_local(url)):
            raise UserError(
                f"{replica.name} cannot join: it needs {self.config.binding}.transport = 'files' and"
                f" a {self.config.binding}.staging that it sees"
            )
        if replica.name in self.supervisor.replicas:
            raise UserError(f"{replica.name} has already joined")
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
        """Removes a server: its requests go to others, and it may be stopped as soon as this
        returns.

        Raises: UserError if no server has this address.
        """
        for name, replica in self.supervisor.replicas.items():
            if url.rstrip("/") in (replica.url, name):
                if replica.ours:
                    return await self.elastic.leave(name)
                return await self.supervisor.remove(name)
        raise UserError(
            f"no server at {url} is in use: those in use are {', '.join(self.supervisor.replicas)}"
        )

    async def _prepare(self, replica: Replica) -> None:
        context = await replica.prepare(
            self.stager.root, self.publisher.sender, bool(self.room.rank)
        )
        if self.stager.current is not None and context < self.context:
            raise UserError(
                f"its context is {context}, the run's is {self.context}: start it with"
                f" {self.context_flag} {self.context}"
            )
        if (
            not replica.ours
            and replica.name not in self._warned
            and await replica.client.accepts_without_key()
        ):
            self.report(self.unprotected_warning(replica.client.url))
        self.context = min(self.context, context)
        self._warned.add(replica.name)
        self.dispatcher.prefixes.forget(replica.name)

    async def _load_current(self, replica: Replica) -> bool:
        return await self.publisher.load_current(replica) or self._base_expected

    async def _score(self, replica: Replica) -> Float32[np.ndarray, " T"]:
        return await self.publisher.probe(replica)

    def _changed(self) -> None:
        limits = [
            m.limit or self.config.concurrency for m in self.fleet.members.values() if m.serves
        ]
        self.concurrency = sum(limits) or self.config.concurrency
        self.dispatcher.notify()

    # ---- tokens and weights

    async def generate(self, request: Request) -> Completion:
        most = max_new_tokens(
            request,
            self.context,
            f"train.row_length (and {self.config.binding}.context, where it is set)",
        )
        features = self.features(request)
        with self.publisher.versions.request() as adapter:
            name = MODEL if adapter is None else adapters.name_of(adapter.version)
            if request.adapter is not None:
                name = request.adapter
                if name not in self.named:
                    raise EngineError(f"the servers have no adapter {name}: add it first")

            def generate(
                tokens: Int32[np.ndarray, " P"], sampling: SamplingParams
            ) -> Coroutine[Any, Any, Completion]:
                seed = request.seed if self._honours_seeds else None
                if seed is not None:
                    seed = slices.seed_of(seed, len(tokens) - len(request.tokens))
                return self.dispatcher.generate(
                    tokens,
                    sampling,
                    model=name,
                    stop=request.stop,
                    features=features,
                    kept=self.kept and request.kept,
                    seed=seed,
                )

            completion = await slices.sliced(
                generate, request.tokens, request.sampling, most, self.config.slice_tokens
            )
            if adapter is None:
                return completion
            versions = np.full(len(completion.tokens), adapter.version, np.int32)
            return replace(completion, versions=versions)

    async def add_adapter(self, directory: Path) -> str:
        """Takes an adapter in PEFT's form out of a directory, and returns its name for requests. Each
        server loads it with its first request there, and again after it was started again.

        Raises: OSError if the directory has none.
        """
        return await asyncio.to_thread(self.named.add, self.stager.root, directory)

    async def remove_adapter(self, name: str) -> None:
        """Unloads an adapter that no request has. Harmless if it is not there."""
        replicas = [self.supervisor.replicas[one] for one in self.fleet.serving()]
        await self.named.remove(name, replicas)

    def expect(self, logp: Callable[[Int32[np.ndarray, " T"]], Float32[np.ndarray, " T"]]) -> None:
        """Compares every server, before it serves, with what the model itself must compute. logp:
        returns the log-probability of each token of a prompt given those before it, 0 for the
        first."""
        self.supervisor.expect(self.version, logp(self._probe_prompt()))
        self._base_expected = True

    def stage(self, trainer: Any, version: int | None = None) -> Staged:
        version = trainer.version if version is None else version
        return (self.publisher.sender or self.stager).stage(trainer, version)

    async def swap(self, staged: Any) -> float:
        return await self.publisher.swap(staged)

    async def sleep(self) -> None:
        await self.publisher.sleep()

    async def wake(self) -> None:
        await self.publisher.wake()

    def _set_version(self, version: int) -> None:
        self.version = version

    def _probe_prompt(self) -> Int32[np.ndarray, " T"]:
        return probe_prompt(self._vocabulary, self.context)

    @cached_property
    def _vocabulary(self) -> int:
        return vocabulary_of(self.model)


def model_context(model: Path, binding: str) -> int:
    """Returns the longest sequence that the model supports. binding: the engine's settings. Raises:
    ConfigError if config.json does not tell."""
    longest = described_text(model).get("max_position_embeddings")
    if longest is None:
        raise ConfigError(
            f"{binding}.context",
            0,
            f"set: {model / 'config.json'} does not say how long a sequence may be",
        )
    return int(longest)
