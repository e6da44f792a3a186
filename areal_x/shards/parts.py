"""The parts of a shard whose engine asks vLLM servers."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gin

from areal_x.cluster.config import ClusterConfig
from areal_x.engines.fleet.division import servers_of
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.config_defaults import vocabulary_of
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.protocols.workflow import Workflow
from areal_x.runtime import open_files
from areal_x.runtime.loop import short_collections
from areal_x.shards.shard import ShardParts
from areal_x.shards.starter import server_starter, threads_of

STARTS = 1000  # of all servers of a shard, before a shard that was opened again repeats their seeds


@dataclass(frozen=True)
class VLLMParts:
    """Makes the parts of a shard in its process (areal_x.shards.shard.MakeParts)."""

    workflow: Workflow
    """Not set up yet, as `evaluation`."""

    evaluation: Workflow | None
    """None for `workflow`, greedily."""

    backend: str

    directory: Path
    """The model's."""

    config: VLLMConfig
    """Of all servers, with its context."""

    placement: ClusterConfig

    logs: Path

    lora: LoRAConfig | None

    experts: bool

    kept: bool
    """Completions whose sampling truncates contain the tokens that it kept."""

    speculation: Speculation
    """Tokens that the servers guess ahead."""

    bindings: str
    """gin's, which configurables read when they are called."""

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables with the keys of servers that the run does not start."""

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self.directory)

    def __call__(self, number: int, times: int, message: Callable[[str], None]) -> ShardParts:
        gin.parse_config(self.bindings, skip_unknown=True)
        os.environ.update(self.keys)
        open_files.raise_limit()
        config, first = servers_of(self.config, number, self.placement.shards)
        tokenizer, closing = load_tokenizer(self.directory), ExitStack()
        closing.enter_context(short_collections())
        workflow = self.workflow.computed_by(self.backend).setup(tokenizer)
        evaluation = workflow.greedy()
        if self.evaluation is not None:
            evaluation = self.evaluation.computed_by(self.backend).setup(tokenizer).greedy()
        starter = None
        if not config.urls:
            starter = closing.enter_context(server_starter(config, self.placement))
            config = replace(config, threads=threads_of(config, self.placement))
        engine = ShardEngine(
            config,
            self.directory,
            self.logs,
            message,
            self.lora,
            self.experts,
            kept=self.kept,
            speculation=self.speculation,
            starter=starter,
            trainer_here=False,
            first=first,
            seeds=itertools.count(
                number + times * STARTS * self.placement.shards, self.placement.shards
            ),
        )
        return ShardParts(engine, workflow, evaluation, closing)


class ShardEngine(VLLMEngine):
    """The engine of a shard: the driver stages the weights that it publishes."""

    async def swap(self, staged: Any) -> float:
        if isinstance(staged, StagedFiles):
            staged = await asyncio.to_thread(self.stager.adopt, staged)
        return await super().swap(staged)
