"""The episodes of groups, run by shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from areal_x.protocols.engine import Engine
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.episodes import EpisodeCounts
from areal_x.rollout.pacing import ImmediatePacing, Pacing
from areal_x.runtime.waits import waiting
from areal_x.shards.messages import Finished
from areal_x.shards.seat import Seat
from areal_x.shards.shards import LOOK_SECONDS, Shards
from areal_x.types import Episode, Group, Task


class ShardedEpisodes:
    """Runs episodes in shards (areal_x.rollout.episodes.Episodes). engine: of all shards."""

    def __init__(self, shards: Shards, engine: Engine, changed: Callable[[], None]) -> None:
        self.pacing: Pacing = ImmediatePacing(engine)
        self._shards = shards
        shards.changed = changed
        self._done: dict[int, asyncio.Future[Finished]] = {}  # by ticket
        self._missing: dict[int, str] = {}  # evaluation tasks without an answer so far

    @property
    def wanted(self) -> int:
        return self._shards.wanted

    def admit(self, group: Group) -> None:
        done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._done[group.ticket] = done
        self._shards.place(group, done)

    async def run(self, group: Group) -> Group:
        ticket, done = group.ticket, self._done.pop(group.ticket)
        with waiting(f"group {ticket}", "its shard", lambda: self.doing(ticket)):
            finished = await done
        return replace(group, episodes=finished.episodes, greedy_reward=finished.greedy_reward)

    def ended(self) -> None: ...

    async def evaluate(self, tasks: Sequence[Task], workflow: Workflow) -> list[Episode]:
        """Divides the tasks among the shards, each of which has the workflow; those of a lost shard
        are divided again."""
        left, found = dict(enumerate(tasks)), dict[int, Episode]()
        self._missing = {index: task.id for index, task in left.items()}
        while left:
            seats = await self._shards.some_ready()
            parts = [list(left.items())[i :: len(seats)] for i in range(len(seats))]
            async with asyncio.TaskGroup() as asking:
                asked = [
                    asking.create_task(self._evaluate(seat, part))
                    for seat, part in zip(seats, parts, strict=True)
                    if part
                ]
            for task in asked:
                found |= task.result()
            left = {index: task for index, task in left.items() if index not in found}
            if left:  # a shard was lost, which `ready` shows soon
                await asyncio.sleep(LOOK_SECONDS)
        return [found[index] for index in range(len(tasks))]

    async def _evaluate(self, seat: Seat, part: Sequence[tuple[int, Task]]) -> dict[int, Episode]:
        """Returns a shard's answers by index; none if it is lost."""
        try:
            answers = await seat.call("evaluate", part)
        except ConnectionError:
            answers = None
        if answers is None:
            return {}
        found = {index: answer for (index, _), answer in zip(part, answers, strict=True)}
        for index in found:
            del self._missing[index]
        return found

    def counts(self) -> EpisodeCounts:
        return self._shards.counts()

    def doing(self, ticket: int) -> str:
        seat = self._shards.seat_of(ticket)
        if seat is None:
            return "no shard is ready"
        return f"{seat.name}: {seat.doing or 'it has just received it'}"

    def evaluating(self) -> Sequence[str]:
        return list(self._missing.values())
