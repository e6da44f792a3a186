"""The contract of a workflow: from a task to scored trajectories, with any number of engine calls.

A workflow of your own subclasses `Workflow` and needs only `run`. It may raise anything: an episode
that raises is a failed episode. Only EngineError and UserError end the run; a TaskError, which
concerns one task, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from areal_x.errors import ConfigError
from areal_x.protocols.engine import ChatServer, Completion, Request, SamplingParams
from areal_x.runtime.hosts import Hosts
from areal_x.types import Episode, Failed, Outcome, Task, TimedOut, Trajectory

EpisodeResult = list[Trajectory] | Episode | Failed | TimedOut


class Generator(Protocol):
    """The part of an engine (areal_x.protocols.engine.Engine) that an episode sees."""

    @property
    def context(self) -> int: ...

    @property
    def version(self) -> int: ...

    async def generate(self, request: Request) -> Completion: ...

    def chat_servers(self) -> Sequence[ChatServer]: ...


class RewardProcesses(Protocol):
    """Runs a reward function in worker processes (areal_x.rewards.pool.RewardPool)."""

    async def score(self, task: Task, text: str) -> Outcome: ...

    async def close(self) -> None: ...


class Workflow(Protocol):
    """A way to attempt a task. Every method but `run` has a default."""

    binding: ClassVar[str] = ""
    """Its name in a gin file, for error messages; may be empty."""

    open_ended: bool = False
    """True if others decide when an episode begins and ends, so that the run waits for it without
    a time limit."""

    def sampling_params(self) -> SamplingParams | None:
        """Returns what its requests are sampled with, by default its attribute `sampling`; None if
        it has no such attribute."""
        return getattr(self, "sampling", None)

    def agents_choose_sampling(self) -> bool:
        """Returns True if each agent may choose temperature, top-p and top-k, which is served but
        never trained on. By default that of the wrapped workflow."""
        inner = self.wrapped()
        return inner is not None and inner.agents_choose_sampling()

    def wrapped(self) -> Workflow | None:
        """Returns the workflow that attempts the same tasks inside this one. By default None."""
        return None

    def reward_function(self) -> Callable[[Task, str], Any] | None:
        """Returns the function that scores its texts. By default None: it scores in another way."""
        return None

    def reward_processes(self, workers: int) -> RewardProcesses | None:
        """Returns processes that run its reward function within its limits; None if it has none."""
        return None

    def computed_by(self, backend: str) -> Workflow:
        """Returns the workflow with its own models, if it has any, computed by this backend, the
        run's. By default itself."""
        return self

    def setup(self, tokenizer: Any) -> Workflow:
        """Returns the workflow ready for this tokenizer; called before any episode. By default
        itself."""
        return self

    def on_hosts(self, hosts: Hosts) -> Workflow:
        """Returns the workflow, set up before, with its rewards and programs spread over other
        nodes too. By default itself: they run on this machine."""
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

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
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


DECLARED = tuple(name for name in vars(Workflow) if not name.startswith("_"))


def check_workflow(binding: str, workflow: Workflow) -> None:
    """Raises: ConfigError if the class of a workflow, or of one inside it, lacks a declared name.
    What a wrapper forwards by `__getattr__` does not count: the call would leave the wrapper."""
    inner: Workflow | None = workflow
    while inner is not None:
        missing = [name for name in DECLARED if not hasattr(type(inner), name)]
        if missing:
            raise ConfigError(
                binding,
                type(inner),
                f"a subclass of areal_x.Workflow, which provides {', '.join(missing)}",
            )
        inner = inner.wrapped()
