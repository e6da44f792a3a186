"""The runner keeps the engine full of episodes and the queue full of groups. One event loop;
nothing here blocks it.

    stream ──task──▶ a ticket of the queue ──▶ group_size episodes at once ──▶ group ──▶ queue
                                                                                 └─ filtered, or none scored: dropped
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_x.errors import function_name
from areal_x.protocols.engine import Engine
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episode import error_of, first_of
from areal_x.rollout.episodes import Episodes, EpisodeSettings, LocalEpisodes
from areal_x.rollout.patience import Patience
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.time_limits import TimeLimits
from areal_x.run.journal import NullRecorder, Recorder, Resumed
from areal_x.runtime.waits import waiting
from areal_x.tasks.screening import Screen
from areal_x.tasks.stream import TaskStream
from areal_x.types import Episode, Group, Task

Filter = Callable[[Group], bool]  # True keeps the group

MakeEpisodes = Callable[[Callable[[], None]], Episodes]
"""Makes what runs the episodes. The function is to be called when there may be room for a group."""


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
        episodes: makes what runs the episodes, by default in this process.
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
        episodes: MakeEpisodes | None = None,
    ) -> None:
        settings = EpisodeSettings(group_size, seed, episode_seconds, greedy, row_length, together)
        self.engine = engine
        self.workflow = workflow
        self.stream = stream
        self.queue = queue
        self.filters = tuple(filters)
        self.patience = Patience(
            failed_groups=failed_groups,
            filtered_groups=filtered_groups,
            groups_per_step=queue.groups_per_step,
            open_ended=workflow.open_ended,
            message=message or (lambda _: None),
        )
        self.limits = TimeLimits()  # of episodes in this process
        self.greedy = greedy
        self.screen = screen
        self.recorder = recorder or NullRecorder()
        self._positions: dict[int, int] = {}  # in the stream, of pending tickets
        self._changed = asyncio.Event()
        self._live: dict[int, None] = {}  # tickets of the groups whose episodes run, in order
        self.episodes = (
            LocalEpisodes(engine, workflow, settings, self._notify, deterministic, self.limits)
            if episodes is None
            else episodes(self._notify)
        )
        self._pacing = self.episodes.pacing
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
                        not self._pacing.has_room(self.episodes.wanted)
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
                    self._live[ticket] = None
                    self.episodes.admit(group)
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
                self._pacing.has_room(self.episodes.wanted) and self.queue.admits
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
        return await self.episodes.evaluate(tasks, workflow)

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
            f" {self.episodes.doing(oldest)}"
        )

    def evaluating(self) -> str:
        """Returns what an evaluation is waiting for, for messages."""
        missing = self.episodes.evaluating()
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"{len(missing)} answers are missing: tasks {', '.join(missing[:3])}{more}"

    def stats(self) -> RolloutStats:
        counts = self.episodes.counts()
        return RolloutStats(
            scored=counts.scored,
            failed=counts.failed,
            timed_out=counts.timed_out,
            given_back=self.queue.dropped,
            generated_tokens=counts.generated_tokens,
            depth=self.queue.depth,
            unfinished=self.queue.unfinished,
            errors=counts.errors,
            left_out=0 if self.screen is None else self.screen.left_out,
        )

    async def _group(self, group: Group) -> None:
        group = await self.episodes.run(group)
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
                    error_of(group.episodes[0].outcome),
                    ever_scored=self.episodes.counts().scored > 0,
                )
            self.recorder.given_back(group)
            self.queue.drop(group.ticket)
            del self._positions[group.ticket]
        del self._live[group.ticket]
        self.episodes.ended()
        self._notify()

    def _rejected_by(self, group: Group) -> str | None:
        """Returns why a group cannot be trained on, or None if it can."""
        if not group.scored:
            return "no scored episode"
        if self.greedy and group.greedy_reward is None:
            return "the lack of a scored greedy answer, which the algorithm needs as a baseline"
        refused = next((keep for keep in self.filters if not keep(group)), None)
        return None if refused is None else f"the filter {function_name(refused)}"

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        """Waits until something that a waiter may wait for has changed. All waiters wake and check
        for themselves."""
        self._changed.clear()
        await self._changed.wait()
