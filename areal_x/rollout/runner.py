"""Keeps the engine full of episodes and the queue full of groups. One event loop; nothing here
blocks it.

stream ──task──▶ a ticket of the queue ──▶ group_size episodes at once ──▶ group ──▶ queue
                                                                             └─ filtered, or none scored: given back
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_x.errors import at_least, function_name, positive
from areal_x.protocols.engine import Completion, Engine, Request
from areal_x.protocols.workflow import Workflow, baseline_of
from areal_x.rollout.episode import error_of, first_of, is_open_ended, run_episode
from areal_x.rollout.pacing import ImmediatePacing, Pacing, WavePacing
from areal_x.rollout.patience import Patience
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.run.journal import Recorder, Resumed, Unrecorded
from areal_x.runtime import timeline
from areal_x.runtime.waits import doing, on_behalf_of, waiting
from areal_x.tasks.screening import Screen
from areal_x.tasks.stream import TaskStream
from areal_x.types import Episode, Failed, Group, Scored, Task, TimedOut

Filter = Callable[[Group], bool]  # True keeps the group

DIFFERENT_ERRORS = 5  # whose first texts are kept for the display

TRAINING, EVALUATION = 0, 1  # first in a seed's key, so that no evaluation repeats a training draw


@dataclass(frozen=True)
class RolloutStats:
    """Since the start. depth: groups that wait for the trainer. errors: the first few different
    ones, how often each came. left_out: times that a task whose prompt is too long was passed by.
    """

    scored: int = 0
    failed: int = 0
    timed_out: int = 0
    given_back: int = 0
    generated_tokens: int = 0
    depth: int = 0
    unfinished: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    left_out: int = 0


@dataclass
class EpisodeEngine:
    """One episode's view of the engine: fixes each call's seed by (key, call), so that a repeated
    episode draws the same, and tells the runner whether this episode wants a place in the engine
    (it does before its first call and during each)."""

    engine: Engine
    key: tuple[int, ...]
    wants: Callable[[int], None]
    generated: Callable[[int], None]
    calls: int = 0
    wanting: int = 1  # counted by whoever makes the view
    about: Mapping[str, int] = field(default_factory=dict)  # what the timeline says of each call
    pace: Pacing | None = None  # when a call reaches the engine, by default at once
    whose: str = "a session"  # episode, for messages

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, request: Request) -> Completion:
        if request.seed is None:
            request = replace(request, seed=seed_of(*self.key, self.calls))
        pace, key = self.pace or ImmediatePacing(self.engine), (*self.key, self.calls)
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
                completion = await pace.generate(key, request)
                span.note(tokens=len(completion.tokens), version=int(self.engine.version))
        finally:
            self.want(-1)
        self.generated(len(completion.tokens))
        return completion

    def want(self, change: int) -> None:
        self.wanting += change
        self.wants(change)


def group_name(ticket: int) -> str:
    """What the names of a group's episodes begin with."""
    return f"group {ticket}, "


def seed_of(*key: int) -> int:
    """A seed in [0, 2³¹) that depends on every part of the key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0]) & 0x7FFFFFFF


class Runner:
    """Runs groups from the stream while the queue has slots and the engine has room.

    group_size: episodes a task. episode_seconds: longest time of one. filters: a group is kept when
    all say so. failed_groups, filtered_groups: after how many groups in a row that failed, or that
    filters gave back, the run ends (see Patience). greedy: also answer each task once greedily, for
    the group's greedy_reward. row_length, together: see `check_fit`. screen: which tasks' prompts
    are too long. recorder: told what becomes of each group, as the run's journal is. message: shows
    a sentence to the user. deterministic: whether admission, waves of requests and publications
    depend on counts alone (areal_x.rollout.pacing).
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
        self.engine, self.workflow, self.stream, self.queue = engine, workflow, stream, queue
        self.group_size, self.seed, self.episode_seconds = group_size, seed, episode_seconds
        self.filters = tuple(filters)
        self.patience = Patience(
            failed_groups,
            filtered_groups,
            queue.groups_per_step,
            is_open_ended(workflow),
            message or (lambda _: None),
        )
        self.greedy = baseline_of(workflow) if greedy else None
        self.row_length, self.together, self.screen = row_length, together, screen
        self.recorder = recorder or Unrecorded()
        self._positions: dict[int, int] = {}  # of the tickets that are pending
        self._changed = asyncio.Event()
        self._pace: Pacing = (
            WavePacing(engine, self._notify) if deterministic else ImmediatePacing(engine)
        )
        self._live: Counter[int] = Counter()  # episodes of each ticket that have not ended
        self._evaluated: dict[int, str] = {}  # tasks of the evaluation that are not answered
        self._wanted = 0  # places in the engine, by episodes in flight
        self._counts: Counter[type] = Counter()
        self._errors: Counter[str] = Counter()
        self._tokens = 0
        self._ended: BaseException | None = None

    def begin(self, version: int, resumed: Resumed | None = None) -> None:
        """From the weights of `version`, and from where `resumed` says: its unfinished groups are
        run again first, with the tickets (and so the seeds) that they had."""
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
        """Everything needed to go on without losing or repeating a task, as JSON can hold it:
        `Resumed`'s, what is finished to be run again, and the workflow's own where it has one."""
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
        UserError, a filter's bug."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    if self.screen is not None:
                        await self.screen.pass_by(self.stream)
                    while (
                        not self._pace.has_room(self._wanted)
                        or (ticket := self.queue.admit()) is None
                    ):
                        self._pace.release()
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
                    self._pace.began(self._live[ticket])
                    groups.create_task(self._group(group))
        except BaseException as error:
            self._ended = self._ended or first_of(error)
            self._notify()
            raise self._ended from self._ended.__cause__

    async def take(self) -> list[Group]:
        """The next step's groups, as soon as the queue gives them. Raises what ended `run`."""
        self._pace.open()
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
        """Ends the rollout with an error from elsewhere: whoever takes gets it."""
        self._ended = self._ended or error
        self._notify()

    async def settled(self) -> None:
        """Until other weights may become current. Raises what ended `run`."""
        while self._ended is None and self._pace.between_publications:
            if not self.queue.unfinished and not (
                self._pace.has_room(self._wanted) and self.queue.admits
            ):
                return
            await self._change()
        if self._ended is not None:
            raise self._ended

    def published(self, version: int) -> None:
        self.queue.published(version)
        self._pace.close()
        self._notify()

    async def evaluate(self, tasks: Sequence[Task], workflow: Workflow) -> list[Episode]:
        """One episode a task, beside the training ones; as many at once as the engine likes to
        have."""
        places = asyncio.Semaphore(self._pace.places(len(tasks)))

        async def one(index: int, task: Task) -> Episode:
            async with places:
                about = {"evaluation": index}
                key, whose = (
                    (self.seed, EVALUATION, index),
                    f"evaluation episode {index} (task {task.id})",
                )
                view = EpisodeEngine(
                    self.engine, key, _nothing, _nothing, about=about, pace=self._pace, whose=whose
                )
                with on_behalf_of(whose):
                    episode = await run_episode(
                        workflow, task, view, self.episode_seconds, self.row_length, self.together
                    )
            self._pace.ended()
            del self._evaluated[index]
            return episode

        self._pace.began(len(tasks))
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
        """What the next step's groups wait for, for messages: any thread may ask."""
        live, finished = (
            list(self._live),
            f"{self.queue.depth} of {self.queue.groups_per_step} are finished",
        )
        if not live:
            return f"{finished}; no other is in flight"
        oldest = min(live)
        task = self.stream.task_at(self._positions[oldest])
        return (
            f"{finished}; the oldest in flight is group {oldest} (task {task.id}):"
            f" {doing(group_name(oldest))}"
        )

    def evaluating(self) -> str:
        """What an evaluation waits for, for messages."""
        missing = list(self._evaluated.values())
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"{len(missing)} answers are missing: tasks {', '.join(missing[:3])}{more}"

    def stats(self) -> RolloutStats:
        return RolloutStats(
            scored=self._counts[Scored],
            failed=self._counts[Failed],
            timed_out=self._counts[TimedOut],
            given_back=self.queue.given_back,
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
        given_back_by = self._given_back_by(group)
        if given_back_by is None:
            self.patience.kept()
            self.recorder.finished(group)
            self.queue.finish(group.ticket, group)
        else:
            if group.scored:
                self.patience.filtered(group, given_back_by)
            else:
                self.patience.failed(
                    error_of(group.episodes[0].outcome), ever_scored=self._counts[Scored] > 0
                )
            self.recorder.given_back(group)
            self.queue.give_back(group.ticket)
            del self._positions[group.ticket]
        del self._live[group.ticket]
        self._pace.ended()
        self._notify()

    async def _episode(self, group: Group, index: int, workflow: Workflow) -> Episode:
        about, key = (
            {"ticket": group.ticket, "index": index},
            (self.seed, TRAINING, group.ticket, index),
        )
        whose = f"{group_name(group.ticket)}episode {index} (task {group.task.id})"
        view = EpisodeEngine(
            self.engine, key, self._want, self._generated, about=about, pace=self._pace, whose=whose
        )
        try:
            with (
                on_behalf_of(whose),
                timeline.span("episode", **about, admitted_version=group.admitted_version) as span,
            ):
                seconds = None if is_open_ended(workflow) else self.episode_seconds
                episode = await run_episode(
                    workflow, group.task, view, seconds, self.row_length, self.together
                )
                span.note(outcome=type(episode.outcome).__name__)
        finally:
            view.want(-view.wanting)
        self._live[group.ticket] -= 1
        # the last one's group is not over before it is finished or given back
        if self._live[group.ticket]:
            self._pace.ended()
        self._counts[type(episode.outcome)] += 1
        return self._noted(episode)

    def _noted(self, episode: Episode) -> Episode:
        """Counts the error of an episode that has one; its traceback is kept with the first of the
        first few different ones."""
        text = error_of(episode.outcome)
        if text is None:
            return episode
        is_new = text not in self._errors and len(self._errors) < DIFFERENT_ERRORS
        if is_new or text in self._errors:
            self._errors[text] += 1
        if isinstance(episode.outcome, Failed) and not is_new:
            return replace(episode, outcome=replace(episode.outcome, traceback=""))
        return episode

    def _given_back_by(self, group: Group) -> str | None:
        """Why a group cannot be trained on; None if it can."""
        if not group.scored:
            return "no scored episode"
        if self.greedy is not None and group.greedy_reward is None:
            return "the lack of a scored greedy answer, with which the algorithm compares"
        refused = next((keep for keep in self.filters if not keep(group)), None)
        return None if refused is None else f"the filter {function_name(refused)}"

    def _want(self, change: int) -> None:
        self._wanted += change
        self._notify()

    def _generated(self, tokens: int) -> None:
        self._tokens += tokens

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        """Until something that a waiter may wait for has changed. All waiters wake; each looks for
        itself."""
        self._changed.clear()
        await self._changed.wait()


def _nothing(_: int) -> None:
    return None
