"""The base class of workflows around another one, whose episodes they score anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.workflow import Workflow
from areal_x.runtime.hosts import Hosts
from areal_x.types import Task


@dataclass(frozen=True)
class Wrapper(Workflow):
    """Forwards everything but `run` to the inner workflow. A subclass adds `run`."""

    workflow: Workflow
    """Workflow whose trajectories are scored."""

    @property
    def open_ended(self) -> bool:  # type: ignore[override]
        return self.workflow.open_ended

    def sampling_params(self) -> SamplingParams | None:
        return self.workflow.sampling_params()

    def wrapped(self) -> Workflow:
        return self.workflow

    def computed_by(self, backend: str) -> Self:
        return replace(self, workflow=self.workflow.computed_by(backend))

    def setup(self, tokenizer: Any) -> Self:
        return replace(self, workflow=self.workflow.setup(tokenizer))

    def on_hosts(self, hosts: Hosts) -> Self:
        return replace(self, workflow=self.workflow.on_hosts(hosts))

    def greedy(self) -> Workflow:
        return replace(self, workflow=self.workflow.greedy())

    def baseline(self) -> Workflow:
        return replace(self, workflow=self.workflow.baseline())

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return self.workflow.tokens_of(task, tokenizer)

    def state(self) -> Any:
        return self.workflow.state()

    def restore(self, state: Any) -> None:
        self.workflow.restore(state)

    async def close(self) -> None:
        await self.workflow.close()
