"""The engine over vLLM servers: started by the run, here on loopback ports or on the nodes of a
cluster, or given by their URLs.

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
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.vllm import adapters, slices
from areal_x.engines.vllm import server as servers
from areal_x.engines.vllm.addresses import is_local
from areal_x.engines.vllm.client import MODEL, VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dispatcher import Dispatcher
from areal_x.engines.vllm.elastic import Elastic
from areal_x.engines.vllm.features import features_for
from areal_x.engines.vllm.gate import unprotected_warning
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.engines.vllm.probe import probe_prompt
from areal_x.engines.vllm.publisher import Publisher
from areal_x.engines.vllm.replica import Replica, external_replica, launch_of
from areal_x.engines.vllm.stager import Stager
from areal_x.engines.vllm.staging import CopiedWeights, StagedFiles
from areal_x.engines.vllm.supervisor import Supervisor
from areal_x.engines.vllm.transports import EXPERIMENTAL, TRANSPORTS, check_machine
from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import read_config, text_config
from areal_x.protocols.engine import Completion, Engine, EngineError, Request, max_new_tokens
from areal_x.protocols.trainer import Scorer
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.runtime import open_files
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose


class VLLMEngine(Engine):
    """The engine over vLLM servers.

    A completion's log-probabilities are of the distribution after temperature, top-k and top-p; for
    greedy decoding (temperature 0) they are of the plain softmax. Request.seed is not honoured: see
    VLLMClient.generate.

    Args:
        model: directory of the model that servers load at their start; published weights replace
            it.
        logs: folder for the servers' logs.
        report: shows progress to the user while servers start.
        lora: if the trainer has adapters, they are published instead of whole weights: a swap then
            pauses nothing, and a request ends on the version that it began on.
        experts: completions contain the experts of a mixture that each token was routed to.
        scorer: computes the reference log-probabilities of the probe prompt when weights are
            staged; None skips the comparison with the trainer.
        starter: starts the run's servers, by default on this machine.
        trainer_here: the trainer is in this process.
        first: number of the first server that it starts, among all of the run.
        seeds: each start of a server takes the next one, by default 0, 1, …
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
        starter: servers.Starter | None = None,
        trainer_here: bool = True,
        first: int = 0,
        seeds: Iterator[int] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.logs = logs
        self.report = report
        self.experts = experts
        self.context = config.context or model_context(model)
        self.concurrency = config.requests
        self.version = 0
        self.lora = lora if lora is not None and lora.rank else None
        self.supervisor = Supervisor(
            config,
            report,
            prepare=self._prepare,
            load=self._load_current,
            score=self._score,
            changed=self._changed,
        )
        self.fleet = self.supervisor.fleet
        self.dispatcher = Dispatcher(config, self.supervisor, experts)
        self.stager = Stager(
            config,
            model,
            lora=self.lora,
            scorer=scorer,
            probe_prompt=self._probe_prompt,
            report=report,
        )
        self.publisher = Publisher(
            config,
            self.stager,
            self.supervisor,
            self.dispatcher,
            lora=self.lora is not None,
            probe_prompt=self._probe_prompt,
            published=self._set_version,
        )
        self._starter = starter or servers.ThisMachine()
        self._seeds = itertools.count() if seeds is None else seeds
        self._first = first
        self.elastic = Elastic(config, self.supervisor, self._starter, self._own, report)
        check_machine(config, trainer_here)
        if self.lora is not None:
            adapters.arguments(self.lora.rank)  # rejects a rank above vLLM's maximum

    # ---- start and end

    async def start(self) -> None:
        atexit.register(self._end_processes)
        try:
            if few := open_files.enough_for(self.concurrency):
                self.report(few)
            if self.config.transport != "files":
                self.report(EXPERIMENTAL.format(transport=self.config.transport))
            self.stager.open()
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
            if self.config.transport != "files":
                self.publisher.open_gpu_sender()
            if self.config.transport != "handles":
                self.supervisor.watch()
            if self.config.transport == "files":
                self.elastic.watch()
        except BaseException:
            await self.close()
            raise

    def _own(self, number: int) -> Replica:
        """Returns a server that the run starts, by its number."""
        launch = launch_of(
            self.config,
            number,
            model=self.model,
            log=self.logs / f"vllm-{self._first + number}.log",
            staging_root=self.stager.root,
            context=self.context,
            lora_rank=self.lora.rank if self.lora else 0,
            experts=self.experts,
        )
        least, most = self.config.bounds
        of_all = f" of {most}" if least == most and number < most and not self._first else ""
        name = f"vLLM server {self._first + number + 1}{of_all}"
        return Replica(name, launch, self._seeds, self._starter, number)

    def _external(self, url: str) -> Replica:
        key = os.environ.get(self.config.key_variable)
        return external_replica(url, key, TRANSPORTS[self.config.transport])

    async def close(self) -> None:
        await self.elastic.close()
        await self.stager.close()
        await self.publisher.close()
        await self.supervisor.close()
        for replica in self.supervisor.replicas.values():
            await replica.disconnect()
        with waiting(whose(), "the vLLM servers to end"):
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
    def _clients(self) -> list[VLLMClient]:
        return [replica.client for replica in self.supervisor.replicas.values()]

    # ---- servers

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        self.elastic.step(trainer_idle, rollout_idle)
        return {"servers": len(self.fleet.serving())}

    def chat_servers(self) -> list[VLLMClient]:
        return [self.supervisor.replicas[name].client for name in self.fleet.serving()]

    async def join(self, url: str) -> None:
        """Adds a running server; it serves with the newest weights once it passes the checks.

        Raises: UserError if it cannot join.
        """
        replica = self._external(url)
        if self.config.transport != "files" or (not self.config.staging and not is_local(url)):
            raise UserError(
                f"{replica.name} cannot join: it needs vllm.transport = 'files' and a vllm.staging"
                " that it sees"
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
        context, workers = await replica.prepare(
            self.stager.root, self.config.transport, self.lora is not None
        )
        if self.stager.current is not None and context < self.context:
            raise UserError(
                f"its context is {context}, the run's is {self.context}: start it with"
                f" --max-model-len {self.context}"
            )
        if (
            not replica.ours
            and replica.name not in self.publisher.workers
            and await replica.client.accepts_without_key()
        ):
            self.report(unprotected_warning(replica.client.url))
        self.context = min(self.context, context)
        self.publisher.workers[replica.name] = workers
        self.dispatcher.prefixes.forget(replica.name)

    async def _load_current(self, replica: Replica) -> bool:
        return await self.publisher.load_current(replica)

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
            request, self.context, "train.row_length (and vllm.context, where it is set)"
        )
        features = (
            None
            if request.images is None
            else features_for(self.model, request.tokens, request.images)
        )
        with self.publisher.versions.request() as adapter:
            name = MODEL if adapter is None else adapters.name_of(adapter.version)
            parts: list[Completion] = []
            while not parts or not slices.ended(parts, most):
                length = slices.next_length(
                    sum(len(part.tokens) for part in parts), most, self.config.slice_tokens
                )
                sampling = request.sampling
                if sampling.max_tokens != length:
                    sampling = replace(sampling, max_tokens=length)
                part = await self.dispatcher.generate(
                    slices.context_of(request.tokens, parts),
                    sampling,
                    model=name,
                    stop=request.stop,
                    features=features,
                )
                parts.append(part)
            completion = slices.joined(parts)
            if adapter is None:
                return completion
            versions = np.full(len(completion.tokens), adapter.version, np.int32)
            return replace(completion, versions=versions)

    def stage(self, trainer: Any, version: int | None = None) -> CopiedWeights | TrainerWeights:
        version = trainer.version if version is None else version
        sender = self.publisher.broadcaster or self.publisher.gpu_sender
        return (sender or self.stager).stage(trainer, version)

    async def swap(self, staged: CopiedWeights | StagedFiles | TrainerWeights) -> float:
        return await self.publisher.swap(staged)

    def _set_version(self, version: int) -> None:
        self.version = version

    def _probe_prompt(self) -> Int32[np.ndarray, " T"]:
        return probe_prompt(self._vocabulary, self.context)

    @cached_property
    def _vocabulary(self) -> int:
        return int(text_config(read_config(self.model))["vocab_size"])


def model_context(model: Path) -> int:
    """Returns the longest sequence that the model supports. Raises: ConfigError if config.json does
    not tell."""
    longest = text_config(read_config(model)).get("max_position_embeddings")
    if longest is None:
        raise ConfigError(
            "vllm.context",
            0,
            f"set: {model / 'config.json'} does not say how long a sequence may be",
        )
    return int(longest)
