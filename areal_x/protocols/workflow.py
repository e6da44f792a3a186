"""The contract of a workflow: from a task to scored trajectories, with any number of engine calls.

A workflow of your own subclasses `Workflow` and needs only `run`. It may raise anything: an episode
that raises is a failed episode. Only EngineError and UserError end the run; a TaskError, which
concerns one task, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from areal_x.protocols.engine import ChatServer, Completion, Request, SamplingParams
from areal_x.types import Episode, Failed, Task, TimedOut, Trajectory

Result = list[Trajectory] | Episode | Failed | TimedOut


class Generator(Protocol):
    """The part of an engine (areal_x.protocols.engine.Engine) that an episode sees."""

    @property
    def context(self) -> int: ...

    @property
    def version(self) -> int: ...

    async def generate(self, request: Request) -> Completion: ...

    def chat_servers(self) -> Sequence[ChatServer]: ...


class Workflow(Protocol):
    """A way to attempt a task. Every method but `run` has a default."""

    open_ended: bool = False
    """True if others decide when an episode begins and ends, so that the run waits for it without
    a time limit."""

    def sampling_params(self) -> SamplingParams | None:
        """Returns what its requests are sampled with, by default its attribute `sampling`; None if
        the workflow does not say."""
        return getattr(self, "sampling", None)

    def computed_by(self, backend: str) -> Workflow:
        """Returns the workflow with its own models, if it has any, computed by this backend, the
        run's. By default itself."""
        return self

    def setup(self, tokenizer: Any) -> Workflow:
        """Returns the workflow ready for this tokenizer; called before any episode. By default
        itself."""
        return self

    def greedy(self) -> Workflow:
        """Returns the same workflow with temperature 0, for evaluation. By default itself."""
        return self

    def baseline(self) -> Workflow:
        """Returns the workflow that scores the greedy answer which an algorithm subtracts from the
        others' rewards, by the same reward as theirs. By default `greedy()`, which an evaluation
        may score differently."""
        return self.greedy()

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        """Returns how many tokens an episode starts with: its prompt, and answers that are given.
        By default None: unknown before the episode."""
        return None

    async def run(self, task: Task, engine: Generator) -> Result:
        """Runs one attempt at the task.

        Returns trajectories, each with its reward set, for a scored episode (whose own reward is
        their mean); an Episode to add the verifier's details; Failed or TimedOut, which are counted
        and shown but never trained on.
        """
        ...

    def state(self) -> Any:
        """Returns what it keeps between episodes, as JSON can hold it; written with each
        checkpoint. By default nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Continues from the `state` in the checkpoint of a resumed run, before any episode. By
        default does nothing."""
        return

    async def close(self) -> None:
        """Ends what `setup` began; safe to call twice. By default nothing."""
        return


def baseline_of(workflow: Workflow) -> Workflow:
    """Returns its `baseline`; for a class that lacks the method, `greedy`."""
    return getattr(workflow, "baseline", workflow.greedy)()


def computed_by(workflow: Any, backend: str) -> Any:
    """Returns `workflow.computed_by(backend)`; a workflow around another that only forwards what it
    lacks stays around it."""
    own = getattr(type(workflow), "computed_by", None)
    return workflow if own is None else own(workflow, backend)
