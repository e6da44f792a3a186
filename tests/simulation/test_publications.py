"""The bound on staleness in random schedules whose publications take longer than steps: the real queue, runner and rollout on
the virtual clock."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run.journal import NullRecorder
from areal_x.simulation import Attempt, FakeEngine, FakeTrainer, Speed, run
from areal_x.simulation.ring import ring
from areal_x.tasks.stream import TaskStream
from areal_x.types import Group, Task
from tests.thorough import thorough

STEPS = 8


class Publishing(FakeEngine):
    """Servers that get weights in waves, after the files were written. out: the version that all of them have."""

    def __init__(self, draw: random.Random, most_seconds: float) -> None:
        length = {seed: draw.choice((1, 1, 2, 5, 40)) for seed in range(97)}
        speed = Speed(math.inf, lambda n: 4.0 * n)
        super().__init__(speed, servers=draw.randint(1, 3), concurrency=3, length=lambda seed: length[seed % 97])
        self.draw, self.most_seconds = draw, most_seconds
        self.out = -1
        self.under_way = 0

    async def swap(self, staged):
        self.under_way += 1
        assert self.under_way == 1, "one publication at a time"
        for server in self._servers:
            await asyncio.sleep(self.draw.uniform(0, self.most_seconds))
            server.swap(staged.version)
        await asyncio.sleep(self.draw.uniform(0, self.most_seconds))  # until the answer of the last
        self.out = self.version = staged.version
        self.under_way -= 1
        return 0.0


@dataclass
class Schedule(NullRecorder):
    """One random run. ages: of the groups that were consumed. in_flight: steps that were taken during a publication."""

    seed: int
    ages: list[int] = field(default_factory=list)
    in_flight: int = 0
    admissions: int = 0

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.per_step, staleness, window = draw.randint(1, 3), draw.randint(0, 3), draw.randint(1, 6)
        self.slots = (staleness + 1) * self.per_step
        self.bound = (self.slots + window - 2) // self.per_step
        self.engine = Publishing(draw, draw.choice((0.1, 1.0, 10.0)))
        self.dropped_share = draw.choice((0.0, 0.2))
        self.queue = TrajectoryQueue(self.per_step, staleness, window)
        runner = Runner(
            self.engine,
            Attempt(prompt_tokens=1),
            TaskStream([Task(f"task {i}", "") for i in range(50)], self.seed),
            self.queue,
            group_size=draw.randint(1, 2),
            seed=self.seed,
            episode_seconds=1e9,
            filters=[lambda group: draw.random() >= self.dropped_share],
            filtered_groups=10**6,
            recorder=self,
        )
        trainer = FakeTrainer(lambda groups: draw.choice((0.0, 0.3, 3.0)), draw.choice((0.0, 0.5)))
        run(ring(Rollout(runner), trainer, STEPS, self.taken))

    def admitted(self, group: Group, position: int) -> None:
        self.admissions += 1
        assert group.admitted_version == self.engine.out, "of weights that are in every server"
        # (1) of the proof, counted by what the servers have: this group and B - 1 others, and those of steps that are out.
        assert self.admissions - self.queue.dropped <= self.engine.out * self.per_step + self.slots

    def taken(self, groups: list[Group]) -> None:
        step = len(self.ages) // self.per_step
        self.in_flight += self.engine.under_way
        assert len(groups) == self.per_step
        for group in groups:
            self.ages.append(step - group.admitted_version)
            assert self.ages[-1] <= self.bound
            for episode in group.episodes:
                versions = episode.trajectories[0].versions
                assert group.admitted_version <= versions[versions >= 0].min()
                assert versions.max() <= self.engine.out + self.engine.under_way


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_schedule_exceeds_the_bound_while_weights_are_on_their_way(seed):
    schedule = Schedule(seed)
    assert len(schedule.ages) == STEPS * schedule.per_step


@thorough
@pytest.mark.timeout(1800)
def test_ten_thousand_schedules_keep_the_bound_and_reach_it_while_weights_are_on_their_way():
    in_flight = reached = 0
    for seed in range(10_000):
        schedule = Schedule(seed)
        in_flight += schedule.in_flight
        reached += max(schedule.ages) == schedule.bound and schedule.in_flight > 0
    print(f"\n{in_flight} of {10_000 * STEPS} steps were taken during a publication; {reached} schedules reached the bound")
    assert in_flight > 5_000
    assert reached > 500
