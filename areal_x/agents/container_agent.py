"""The base of workflows whose agents work in containers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from areal_x.agents.agent_process import AgentProcess
from areal_x.sandbox.containers.choice import containers_of
from areal_x.sandbox.containers.container import Container, Containers
from areal_x.sandbox.containers.limits import ContainerLimits


@dataclass(frozen=True, kw_only=True)
class ContainerAgent(AgentProcess):
    """An agent's program with a container per episode, which it reaches by a socket
    (areal_x.agents.container_door)."""

    containers: ContainerLimits = field(default_factory=ContainerLimits)
    """Where containers run and what they may use."""
    machines: Containers | None = None

    def setup(self, tokenizer: Any) -> Any:
        """Raises: UserError if the program, or what runs containers, does not exist."""
        ready = super().setup(tokenizer)
        return replace(ready, machines=containers_of(self.containers))

    @asynccontextmanager
    async def container(self, image: str | None) -> AsyncIterator[Container]:
        """Yields a new container, which ends with the context."""
        assert self.machines is not None, "call setup(tokenizer) first"
        container = await self.machines.start(image)
        try:
            yield container
        finally:
            await container.stop()

    async def close(self) -> None:
        await super().close()
        if self.machines is not None:
            await self.machines.close()
