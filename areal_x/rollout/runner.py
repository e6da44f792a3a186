"""The runner keeps the engine full of episodes and the queue full of groups. One event loop;
nothing here blocks it.

    stream ──task──▶ a ticket of the queue ──▶ group_size episodes at once ──▶ group ──▶ queue
                                                                                 └─ filtered, or none scored: dropped
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_x.errors import at_least, function_name, positive
from areal_x.protocols.engine import ChatServer, Completion, Engine, Request
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episode import error_of, first_of, run_episode
from areal_x.rollout.pacing import ImmediatePacing, Pacing, WavePacing
from areal_x.rollout.patience import Patience
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.run.journal import NullRecorder, Recorder, Resumed
from areal_x.runtime import timeline
from areal_x.runtime.waits import doing, on_behalf_of, waiting
from areal_x.tasks.screening import Screen
from areal_x.tasks.stream import TaskStream
from areal_x.types import Episode, Failed, Group, Scored, Task, TimedOut

Filter = Callable[[Group], bool]  # True keeps the group

DIFFERENT_ERRORS = 5  # distinct errors that are counted by their text

TRAINING, EVALUATION = 0, 1  # part of a seed's key, so that evaluation and training seeds differ


@dataclass(frozen=True)
class RolloutStats:
    """Counts since the start."""

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    given_back: int = 0
    """Groups that were dropped: rejected by a filter, or without a scored episode."""
    generated_tokens: int = 0
    depth: int = 0
    """Groups that wait for the trainer."""
    unfinished: int = 0
    """Groups that are being generated or scored."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """How often each of the first few distinct errors occurred."""
    left_out: int = 0
    """Tasks skipped because their prompt is too long, counted each time."""


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


class Runner:
    """Runs groups of tasks from the stream while the queue has slots and the engine has room.

    Args:
        group_size: episodes per task.
        episode_seconds: time limit of an episode.
        filters: a group is kept if all return True.
        failed_groups, filtered_groups: number of consecutive groups that failed, or that filters
            rejected, after which the run ends (see Patience).
        greedy: also answers each task once greedily, for the group's greedy_reward.
        row_length, together: see `check_fit`.
        screen: skips tasks whose prompts are too long.
        recorder: is notified of each group's admission and end, as the run's journal is.
        message: shows a sentence to the user.
        deterministic: admission, waves of requests and publications depend on counts alone
            (areal_x.rollout.pacing).
    """

    def __init__(
        self,
        engine: Engine,
        workflow: Workflow,
        stream: TaskStream,
        queue: TrajectoryQueue,
        *,
        group_size: int,
        seed: int = 0,
        episode_seconds: float = 600.0,
        filters: Sequence[Filter] = (),
        failed_groups: int = 3,
        filtered_groups: int | None = None,
        greedy: bool = False,
        row_length: int | None = None,
        together: int = 1,
        screen: Screen | None = None,
        recorder: Recorder | None = None,
        deterministic: bool = False,
        message: Callable[[str], None] | None = None,
    ) -> None:
        at_least("train.group_size", group_size, 1)
        positive("train.episode_seconds", episode_seconds)
        self.engine = engine
        self.workflow = workflow
        self.stream = stream
        self.queue = queue
        self.group_size = group_size
        self.seed = seed
        self.episode_seconds = episode_seconds
        self.filters = tuple(filters)
        self.patience = Patience(
            failed_groups=failed_groups,
            filtered_groups=filtered_groups,
            groups_per_step=queue.groups_per_step,
            open_ended=workflow.open_ended,
            message=message or (lambda _: None),
        )
        self.greedy = workflow.baseline() if greedy else None
        self.row_length = row_length
        self.together = together
        self.screen = screen
        self.recorder = recorder or NullRecorder()
        self._positions: dict[int, int] = {}  # in the stream, of pending tickets
        self._changed = asyncio.Event()
        self._pacing: Pacing = (
            WavePacing(engine, self._notify) if deterministic else ImmediatePacing(engine)
        )
        self._live: Counter[int] = Counter()  # unfinished episodes of each ticket
        self._evaluated: dict[int, str] = {}  # evaluation tasks without an answer so far
        self._wanted = 0  # engine slots wanted by episodes in flight
        self._counts: Counter[type] = Counter()
        self._errors: Counter[str] = Counter()
        self._tokens = 0
        self._ended: BaseException | None = None

    def begin(self, version: int, resumed: Resumed | None = None) -> None:
        """Starts from the weights of `version`, and from the state `resumed`: its unfinished groups
        are run again first, with the tickets (and so the seeds) that they had."""
        resumed = resumed or Resumed()
        self.stream.position = resumed.position
        if resumed.workflow is not None:
            self.workflow.restore(resumed.workflow)
        self._positions = {
            **resumed.unfinished,
            **{group.ticket: position for position, group in resumed.finished},
        }
        finished = [group for _, group in resumed.finished]
        self.queue.begin(
            version, resumed.next_ticket, list(resumed.unfinished), finished, resumed.order
        )

    def state(self) -> dict[str, Any]:
        """Returns everything needed to continue without losing or repeating a task, as JSON can
        hold it: the fields of `Resumed`, with finished groups to be run again, and the workflow's
        state if it has any."""
        pending = [[ticket, self._positions[ticket]] for ticket in self.queue.pending()]
        state = {
            "position": self.stream.position,
            "next_ticket": self.queue.next_ticket,
            "unfinished": pending,
        }
        kept = self.workflow.state()
        return state if kept is None else {**state, "workflow": kept}

    async def run(self) -> None:
        """Admits and runs groups until it is cancelled. Raises what ended it: EngineError,
        UserError, or a filter's own error."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    if self.screen is not None:
                        await self.screen.skip_long_prompts(self.stream)
                    while (
                        not self._pacing.has_room(self._wanted)
                        or (ticket := self.queue.admit()) is None
                    ):
                        self._pacing.release()
                        with waiting("the rollout", "room for another group", idle=True):
                            await self._change()
                    if ticket not in self._positions:
                        self._positions[ticket], task = self.stream.next()
                    else:
                        task = self.stream.task_at(self._positions[ticket])
                    group = Group(task, ticket, self.queue.version)
                    self.recorder.admitted(group, self._positions[ticket])
                    self._live[ticket] = self.group_size + (self.greedy is not None)
                    self._want(self._live[ticket])
                    self._pacing.began(self._live[ticket])
                    groups.create_task(self._group(group))
        except BaseException as error:
            self._ended = self._ended or first_of(error)
            self._notify()
            raise self._ended from self._ended.__cause__

    async def take(self) -> list[Group]:
        """Returns the next step's groups as soon as the queue has them. Raises what ended `run`."""
        self._pacing.open()
        while self._ended is None:
            if (batch := self.queue.take()) is not None:
                self.recorder.consumed(self.queue.step, batch)
                for group in batch:
                    del self._positions[group.ticket]
                self._notify()
                return batch
            await self._change()
        raise self._ended

    def fail(self, error: BaseException) -> None:
        """Ends the rollout with an error from elsewhere, which `take` raises."""
        self._ended = self._ended or error
        self._notify()

    async def settled(self) -> None:
        """Returns when other weights may become current. Raises what ended `run`."""
        while self._ended is None and self._pacing.between_publications:
            if not self.queue.unfinished and not (
                self._pacing.has_room(self._wanted) and self.queue.admits
            ):
                return
            await self._change()
        if self._ended is not None:
            raise self._ended

    def published(self, version: int) -> None:
        self.queue.published(version)
        self._pacing.close()
        self._notify()

    async def evaluate(self, tasks: Sequence[Task], workflow: Workflow) -> list[Episode]:
        """Runs one episode per task beside the training episodes, as many at once as the engine has
        room for."""
        places = asyncio.Semaphore(self._pacing.places(len(tasks)))

        async def one(index: int, task: Task) -> Episode:
            async with places:
                whose = f"evaluation episode {index} (task {task.id})"
                view = EpisodeEngine(
                    engine=self.engine,
                    key=(self.seed, EVALUATION, index),
                    on_want=_nothing,
                    on_tokens=_nothing,
                    about={"evaluation": index},
                    pacing=self._pacing,
                    whose=whose,
                )
                with on_behalf_of(whose):
                    episode = await run_episode(
                        workflow, task, view, self.episode_seconds, self.row_length, self.together
                    )
            self._pacing.ended()
            del self._evaluated[index]
            return episode

        self._pacing.began(len(tasks))
        self._evaluated = {index: task.id for index, task in enumerate(tasks)}
        try:
            async with asyncio.TaskGroup() as episodes:
                running = [
                    episodes.create_task(one(index, task)) for index, task in enumerate(tasks)
                ]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return [episode.result() for episode in running]

    def doing(self) -> str:
        """Returns what the next step's groups are waiting for, for messages. Callable from any
        thread."""
        live = list(self._live)
        finished = f"{self.queue.depth} of {self.queue.groups_per_step} are finished"
        if not live:
            return f"{finished}; no other is in flight"
        oldest = min(live)
        task = self.stream.task_at(self._positions[oldest])
        return (
            f"{finished}; the oldest in flight is group {oldest} (task {task.id}):"
            f" {doing(group_name(oldest))}"
        )

    def evaluating(self) -> str:
        """Returns what an evaluation is waiting for, for messages."""
        missing = list(self._evaluated.values())
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"{len(missing)} answers are missing: tasks {', '.join(missing[:3])}{more}"

    def stats(self) -> RolloutStats:
        return RolloutStats(
            scored=self._counts[Scored],
            failed=self._counts[Failed],
            timed_out=self._counts[TimedOut],
            given_back=self.queue.dropped,
            generated_tokens=self._tokens,
            depth=self.queue.depth,
            unfinished=self.queue.unfinished,
            errors=dict(self._errors),
            left_out=0 if self.screen is None else self.screen.left_out,
        )

    async def _group(self, group: Group) -> None:
        async with asyncio.TaskGroup() as episodes:
            running = [
                episodes.create_task(self._episode(group, index, self.workflow))
                for index in range(self.group_size)
            ]
            if self.greedy is not None:
                greedy = episodes.create_task(self._episode(group, self.group_size, self.greedy))
        group = replace(group, episodes=tuple(episode.result() for episode in running))
        if self.greedy is not None and isinstance(outcome := greedy.result().outcome, Scored):
            group = replace(group, greedy_reward=outcome.reward)
        rejected_by = self._rejected_by(group)
        if rejected_by is None:
            self.patience.kept()
            self.recorder.finished(group)
            self.queue.finish(group.ticket, group)
        else:
            if group.scored:
                self.patience.filtered(group, rejected_by)
            else:
                self.patience.failed(
                    error_of(group.episodes[0].outcome), ever_scored=self._counts[Scored] > 0
                )
            self.recorder.given_back(group)
            self.queue.drop(group.ticket)
            del self._positions[group.ticket]
        del self._live[group.ticket]
        self._pacing.ended()
        self._notify()

    async def _episode(self, group: Group, index: int, workflow: Workflow) -> Episode:
        about = {"ticket": group.ticket, "index": index}
        whose = f"{group_name(group.ticket)}episode {index} (task {group.task.id})"
        view = EpisodeEngine(
            engine=self.engine,
            key=(self.seed, TRAINING, group.ticket, index),
            on_want=self._want,
            on_tokens=self._count_tokens,
            about=about,
            pacing=self._pacing,
            whose=whose,
        )
        try:
            with (
                on_behalf_of(whose),
                timeline.span("episode", **about, admitted_version=group.admitted_version) as span,
            ):
                seconds = None if workflow.open_ended else self.episode_seconds
                episode = await run_episode(
                    workflow, group.task, view, seconds, self.row_length, self.together
                )
                span.note(outcome=type(episode.outcome).__name__)
        finally:
            view.want(-view.wanting)
        self._live[group.ticket] -= 1
        # a group's last episode ends with the group: see `_group`
        if self._live[group.ticket]:
            self._pacing.ended()
        self._counts[type(episode.outcome)] += 1
        return self._count_error(episode)

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

    def _rejected_by(self, group: Group) -> str | None:
        """Returns why a group cannot be trained on, or None if it can."""
        if not group.scored:
            return "no scored episode"
        if self.greedy is not None and group.greedy_reward is None:
            return "the lack of a scored greedy answer, which the algorithm needs as a baseline"
        refused = next((keep for keep in self.filters if not keep(group)), None)
        return None if refused is None else f"the filter {function_name(refused)}"

    def _want(self, change: int) -> None:
        self._wanted += change
        self._notify()

    def _count_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        """Waits until something that a waiter may wait for has changed. All waiters wake and check
        for themselves."""
        self._changed.clear()
        await self._changed.wait()


def _nothing(_: int) -> None:
    return None
