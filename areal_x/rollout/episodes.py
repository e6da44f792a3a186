"""The episodes of groups: each task is attempted several times at once, on an engine.

Runner ──group without episodes──▶ Episodes ──the same with them──▶ Runner
                                      └─ in this process (LocalEpisodes), or in several (areal_x.shards)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from areal_x.errors import at_least, positive
from areal_x.protocols.engine import ChatServer, Completion, Engine, Request
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episode import error_of, first_of, run_episode
from areal_x.rollout.pacing import ImmediatePacing, Pacing, WavePacing
from areal_x.rollout.time_limits import TimeLimits
from areal_x.runtime import timeline
from areal_x.runtime.waits import doing, on_behalf_of, waiting
from areal_x.types import Episode, Failed, Group, Scored, Task, TimedOut

DIFFERENT_ERRORS = 5  # distinct errors that are counted by their text

TRAINING, EVALUATION = 0, 1  # part of a seed's key, so that evaluation and training seeds differ


@dataclass(frozen=True)
class EpisodeSettings:
    """How the episodes of groups are run."""

    group_size: int
    """Episodes per task."""

    seed: int = 0

    episode_seconds: float = 600.0
    """Time limit of an episode."""

    greedy: bool = False
    """Also answers each task once greedily, for the group's greedy_reward."""

    row_length: int | None = None
    """See `check_fit`, as `together`."""

    together: int = 1

    def __post_init__(self) -> None:
        at_least("train.group_size", self.group_size, 1)
        positive("train.episode_seconds", self.episode_seconds)

    @property
    def attempts(self) -> int:
        """The number of episodes of a group, the greedy one included."""
        return self.group_size + self.greedy


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts since the start."""

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    generated_tokens: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """How often each of the first few distinct errors occurred."""

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(
            self.scored + other.scored,
            self.failed + other.failed,
            self.timed_out + other.timed_out,
            self.generated_tokens + other.generated_tokens,
            Counter(self.errors) + Counter(other.errors),
        )


class Episodes(Protocol):
    """Runs the episodes of groups. All of it belongs to the rollout's event loop."""

    pacing: Pacing

    @property
    def wanted(self) -> int:
        """Number of engine slots that the admitted episodes hold or wait for."""
        ...

    def admit(self, group: Group) -> None:
        """Counts the episodes of a group, which `run` is called with next."""
        ...

    async def run(self, group: Group) -> Group:
        """Returns the group with its episodes, in their order, and its greedy reward. Raises what
        ends the run: EngineError, UserError."""
        ...

    def ended(self) -> None:
        """Called for each group that was run, once it is finished or dropped."""
        ...

    async def evaluate(self, tasks: Sequence[Task], workflow: Workflow) -> list[Episode]:
        """Runs one episode per task, as many at once as the engine has room for."""
        ...

    def counts(self) -> EpisodeCounts: ...

    def doing(self, ticket: int) -> str:
        """Describes what the episodes of a group wait for. Callable from any thread."""
        ...

    def evaluating(self) -> Sequence[str]:
        """Returns the tasks of the evaluation that have no answer yet."""
        ...


@dataclass
class EpisodeEngine:
    """One episode's view of the engine. It derives each call's seed from (key, call), so that a
    repeated episode samples the same tokens, and counts the engine slots that the episode wants:
    one before its first call and one during each call."""

    engine: Engine
    key: tuple[int, ...]
    """First parts of each call's seed."""
    on_want: Callable[[int], None]
    """Called with each change of `wanting`."""
    on_tokens: Callable[[int], None]
    """Called with the number of tokens of each completion."""
    calls: int = 0
    wanting: int = 1
    """Engine slots wanted now; the initial one is counted by whoever makes the view."""
    about: Mapping[str, int] = field(default_factory=dict)
    """Annotations of each call in the timeline."""
    pacing: Pacing | None = None
    """Decides when a call reaches the engine; None sends it immediately."""
    whose: str = "a session"
    """The episode's name in messages."""

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, request: Request) -> Completion:
        if request.seed is None:
            request = replace(request, seed=seed_of(*self.key, self.calls))
        pacing = self.pacing or ImmediatePacing(self.engine)
        key = (*self.key, self.calls)
        self.calls += 1
        if self.calls > 1:
            self.want(1)
        try:
            with (
                timeline.span("generate", **self.about, call=self.calls) as span,
                on_behalf_of(self.whose),
                waiting(
                    self.whose,
                    "the engine",
                    f"call {self.calls}, a prompt of {len(request.tokens)} tokens",
                ),
            ):
                completion = await pacing.generate(key, request)
                span.note(tokens=len(completion.tokens), version=int(self.engine.version))
        finally:
            self.want(-1)
        self.on_tokens(len(completion.tokens))
        return completion

    def chat_servers(self) -> Sequence[ChatServer]:
        return self.engine.chat_servers()

    def want(self, change: int) -> None:
        self.wanting += change
        self.on_want(change)


def group_name(ticket: int) -> str:
    """Returns the prefix of the names of a group's episodes."""
    return f"group {ticket}, "


def seed_of(*key: int) -> int:
    """Returns a seed in [0, 2³¹) that depends on every part of the key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0]) & 0x7FFFFFFF


class LocalEpisodes:
    """Runs episodes in this process.

    changed: called when `wanted` or the room for groups may have changed. deterministic: see
    areal_x.rollout.pacing. limits: of the episodes' time.
    """

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        settings: EpisodeSettings,
        changed: Callable[[], None],
        deterministic: bool = False,
        limits: TimeLimits | None = None,
    ) -> None:
        self.settings = settings
        self._limits = limits or TimeLimits()
        self.pacing: Pacing = (
            WavePacing(engine, changed) if deterministic else ImmediatePacing(engine)
        )
        self.wanted = 0
        self._engine, self._workflow = engine, workflow
        self._greedy = workflow.baseline() if settings.greedy else None
        self._changed = changed
        self._live: Counter[int] = Counter()  # unfinished episodes of each ticket
        self._evaluated: dict[int, str] = {}  # evaluation tasks without an answer so far
        self._counts: Counter[type] = Counter()
        self._errors: Counter[str] = Counter()
        self._tokens = 0

    def admit(self, group: Group) -> None:
        self._live[group.ticket] = self.settings.attempts
        self._want(self.settings.attempts)
        self.pacing.began(self.settings.attempts)

    async def run(self, group: Group) -> Group:
        size, greedy = self.settings.group_size, None
        async with asyncio.TaskGroup() as episodes:
            running = [
                episodes.create_task(self._episode(group, index, self._workflow))
                for index in range(size)
            ]
            if self._greedy is not None:
                greedy = episodes.create_task(self._episode(group, size, self._greedy))
        del self._live[group.ticket]
        group = replace(group, episodes=tuple(episode.result() for episode in running))
        if greedy is not None and isinstance(outcome := greedy.result().outcome, Scored):
            group = replace(group, greedy_reward=outcome.reward)
        return group

    def ended(self) -> None:
        self.pacing.ended()

    async def evaluate(self, tasks: Sequence[Task], workflow: Workflow) -> list[Episode]:
        return await self.evaluate_some(list(enumerate(tasks)), workflow)

    async def evaluate_some(
        self, tasks: Sequence[tuple[int, Task]], workflow: Workflow
    ) -> list[Episode]:
        """Does `evaluate` for some of an evaluation's tasks, each with its index."""
        places = asyncio.Semaphore(self.pacing.places(len(tasks)))

        async def one(index: int, task: Task) -> Episode:
            async with places:
                whose = f"evaluation episode {index} (task {task.id})"
                view = EpisodeEngine(
                    engine=self._engine,
                    key=(self.settings.seed, EVALUATION, index),
                    on_want=_nothing,
                    on_tokens=_nothing,
                    about={"evaluation": index},
                    pacing=self.pacing,
                    whose=whose,
                )
                with on_behalf_of(whose):
                    episode = await self._attempt(
                        workflow, task, view, self.settings.episode_seconds
                    )
            self.pacing.ended()
            del self._evaluated[index]
            return episode

        self.pacing.began(len(tasks))
        self._evaluated |= {index: task.id for index, task in tasks}
        try:
            async with asyncio.TaskGroup() as episodes:
                running = [episodes.create_task(one(index, task)) for index, task in tasks]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return [episode.result() for episode in running]

    def counts(self) -> EpisodeCounts:
        return EpisodeCounts(
            scored=self._counts[Scored],
            failed=self._counts[Failed],
            timed_out=self._counts[TimedOut],
            generated_tokens=self._tokens,
            errors=dict(self._errors),
        )

    def doing(self, ticket: int) -> str:
        return doing(group_name(ticket))

    def evaluating(self) -> Sequence[str]:
        return list(self._evaluated.values())

    async def _episode(self, group: Group, index: int, workflow: Workflow) -> Episode:
        about = {"ticket": group.ticket, "index": index}
        whose = f"{group_name(group.ticket)}episode {index} (task {group.task.id})"
        view = EpisodeEngine(
            engine=self._engine,
            key=(self.settings.seed, TRAINING, group.ticket, index),
            on_want=self._want,
            on_tokens=self._count_tokens,
            about=about,
            pacing=self.pacing,
            whose=whose,
        )
        try:
            with (
                on_behalf_of(whose),
                timeline.span("episode", **about, admitted_version=group.admitted_version) as span,
            ):
                seconds = None if workflow.open_ended else self.settings.episode_seconds
                episode = await self._attempt(workflow, group.task, view, seconds)
                span.note(outcome=type(episode.outcome).__name__)
        finally:
            view.want(-view.wanting)
        self._live[group.ticket] -= 1
        # a group's last episode ends with the group: see `Episodes.ended`
        if self._live[group.ticket]:
            self.pacing.ended()
        self._counts[type(episode.outcome)] += 1
        return self._count_error(episode)

    async def _attempt(
        self, workflow: Workflow, task: Task, view: EpisodeEngine, seconds: float | None
    ) -> Episode:
        settings = self.settings
        return await run_episode(
            workflow,
            task,
            view,
            seconds,
            row_length=settings.row_length,
            together=settings.together,
            limits=self._limits,
        )

    def _count_error(self, episode: Episode) -> Episode:
        """Counts the error of an episode that has one; its traceback is kept with the first
        occurrence of the first few distinct errors."""
        text = error_of(episode.outcome)
        if text is None:
            return episode
        is_new = text not in self._errors and len(self._errors) < DIFFERENT_ERRORS
        if is_new or text in self._errors:
            self._errors[text] += 1
        if isinstance(episode.outcome, Failed) and not is_new:
            return replace(episode, outcome=replace(episode.outcome, traceback=""))
        return episode

    def _want(self, change: int) -> None:
        self.wanted += change
        self._changed()

    def _count_tokens(self, tokens: int) -> None:
        self._tokens += tokens


def _nothing(_: int) -> None:
    return None
