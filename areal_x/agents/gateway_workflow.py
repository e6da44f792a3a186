"""The base of the agents' workflows: a gateway of the run's own, and episodes that are its
sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from areal_x.agents.chat.credit import Credit, episode_of_calls
from areal_x.agents.chat.rendering import PlainRenderer, Renderer, TemplateRenderer
from areal_x.agents.chat.server_renderer import ServerRenderer
from areal_x.agents.gateway.gateway import Gateway
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.errors import ConfigError, UserError, one_of
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.runtime.credentials import write_address
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.types import Outcome
from areal_x.workflows.single_turn import with_end

H = TypeVar("H", bound="GatewayWorkflow")
RENDERING = ("transformers", "server")


class LazyGateway:
    """A gateway that starts with its first session."""

    def __init__(self, gateway: Gateway, renderer: TemplateRenderer | PlainRenderer) -> None:
        self.gateway = gateway
        self.renderer = renderer
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self, address: Path | None = None) -> None:
        """Starts the gateway if necessary. address: file that its address and key are then written
        to."""
        async with self._starting:
            if self._started:
                return
            self._started = True
            await self.gateway.start(self.renderer)
            if address is not None:
                write_address(address, self.gateway.url, self.gateway.key)

    async def close(self) -> None:
        await self.gateway.close()


@dataclass(frozen=True, kw_only=True)
class GatewayWorkflow(Workflow):
    """A workflow whose episodes are sessions of a gateway."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How completions are sampled; the model's end tokens are added to its stop tokens."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    """What an episode may use."""
    credit: Credit = field(default_factory=Credit)
    """How the episode's reward is credited to its calls."""
    gateway: Gateway = field(default_factory=Gateway)
    """The server that agents call."""
    rendering: str = "transformers"
    """Where messages become tokens and completions are parsed: "transformers" for the model's chat
    template in this process, or "server" for the vLLM servers' own template and parsers."""
    host: LazyGateway | None = None

    def setup(self: H, tokenizer: Any) -> H:
        """Raises: UserError for a tokenizer without an end token, and as Gateway.prepare."""
        one_of("rendering", self.rendering, RENDERING)
        if self.rendering == "server" and self.gateway.workers:
            raise ConfigError(
                "gateway.workers",
                self.gateway.workers,
                "0 with rendering = 'server': the vLLM servers render then",
            )
        self.gateway.prepare()
        by_template = tokenizer.chat_template is not None
        host = LazyGateway(
            self.gateway, TemplateRenderer(tokenizer) if by_template else PlainRenderer(tokenizer)
        )
        return replace(self, sampling=with_end(self.sampling, tokenizer), host=host)

    def greedy(self: H) -> H:
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    def agents_choose_sampling(self) -> bool:
        return self.gateway.sampling != "run"

    async def open(self, engine: Generator) -> GatewaySession:
        """Opens a session whose completions come from this episode's engine."""
        host = self.lazy_gateway()
        await host.start()
        return host.gateway.open(engine, self.renderer(engine), self.sampling, self.limits)

    def renderer(self, engine: Generator) -> Renderer:
        renderer = self.lazy_gateway().renderer
        if self.rendering == "transformers":
            return renderer
        engine.chat_servers()  # raises for an engine without servers
        if isinstance(renderer, PlainRenderer):
            raise UserError(
                "rendering = 'server' needs vLLM servers (train.engine = 'vllm') and a model with a"
                " chat template"
            )
        return ServerRenderer(renderer.tokenizer, engine.chat_servers)

    async def episode(self, session: GatewaySession, outcome: Outcome) -> EpisodeResult:
        """Returns the episode's trajectories, by the outcome and the session's calls."""
        calls = session.calls()
        # each prompt is compared with each earlier trajectory
        size = sum(len(call.prompt) for call in calls) * len(calls)
        return await inline_or_in_pool(size, episode_of_calls, calls, outcome, self.credit)

    def lazy_gateway(self) -> LazyGateway:
        assert self.host is not None, "call setup(tokenizer) first"
        return self.host

    async def close(self) -> None:
        if self.host is not None:
            await self.host.close()
