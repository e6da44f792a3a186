"""The ring around a fake engine and a fake trainer, one turn after the other on the virtual clock.

Runner, queue, journal and the way that weights take are the real ones; what a model would do only
takes its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_x.batching.batch import staleness
from areal_x.monitor.measures import describe
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import Generator, Workflow
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run.journal import Recorder, Resumed
from areal_x.simulation.clock import run
from areal_x.simulation.engine import FakeEngine
from areal_x.tasks.stream import TaskStream
from areal_x.types import Group, Task, Trajectory

TASKS = 1000
DAY = 86400.0
Seconds = float | Callable[[Sequence[Group]], float]


@dataclass(frozen=True)
class Attempt(Workflow):
    """One call of the engine with a prompt of so many tokens; the reward is 1 where the first new
    token is even, else 0."""

    prompt_tokens: int = 100
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=2**20))

    async def run(self, task: Task, engine: Generator) -> list[Trajectory]:
        prompt = np.ones(self.prompt_tokens, np.int32)
        said = await engine.generate(Request(prompt, self.sampling))
        reward = float(said.tokens[0] % 2 == 0)
        return [
            Trajectory.from_completion(
                prompt, said.tokens, said.logprobs, said.versions, reward, said.finish_reason
            )
        ]


@dataclass
class FakeTrainer:
    """Takes time. step_seconds: of one step, or a function of the groups that it trains on.
    publish_seconds: to stage weights, while generation goes on."""

    step_seconds: Seconds = 0.0
    publish_seconds: float = 0.0
    version: int = 0

    async def step(self, groups: Sequence[Group]) -> None:
        await asyncio.sleep(
            self.step_seconds(groups) if callable(self.step_seconds) else self.step_seconds
        )
        self.version += 1


async def ring(
    rollout: Rollout,
    trainer: FakeTrainer,
    steps: int,
    watch: Callable[[list[Group]], None] | None = None,
    resumed: Resumed | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, float]]:
    """So many turns; of each the row that a run's metrics would have, in virtual seconds. watch: is
    shown what each consumes. resumed: where a run that ended goes on, from the trainer's version.
    save: is given what a checkpoint after each turn holds.

    Beside a run's keys: slot_seconds, in which requests held slots of the engine, all slots
    together.
    """
    engine: FakeEngine = rollout.engine  # type: ignore[assignment]
    now = asyncio.get_running_loop().time
    await engine.start()
    try:
        rollout.resumed = resumed
        await rollout.swap(engine.stage(trainer), trainer.version)
        rows = []
        for _ in range(steps):
            began, used = now(), engine.used()
            groups = await rollout.runner.take()
            waited = now()
            ages = staleness(groups, trainer.version)
            if watch is not None:
                watch(groups)
            await trainer.step(groups)
            updated = now()
            await asyncio.sleep(trainer.publish_seconds)
            paused = await rollout.swap(engine.stage(trainer), trainer.version)
            row = {
                "step": trainer.version,
                **describe(groups, ages),
                "wait_seconds": waited - began,
            }
            row |= {
                "update_seconds": updated - waited,
                "publish_seconds": now() - updated,
                "pause_seconds": paused,
            }
            rows.append(row | {"seconds": now() - began, "slot_seconds": engine.used() - used})
            if save is not None:
                save(rollout.runner.state())
        return rows
    finally:
        await rollout.end()


def simulate(
    engine: FakeEngine,
    trainer: FakeTrainer,
    *,
    steps: int,
    groups_per_step: int,
    group_size: int,
    max_staleness: int = 2,
    window: int = 1,
    workflow: Workflow | None = None,
    seed: int = 0,
    recorder: Recorder | None = None,
    watch: Callable[[list[Group]], None] | None = None,
) -> list[dict[str, float]]:
    """Runs `ring` from the trainer's version on, with a runner of these settings, which are named
    as those of `train`. workflow: by default `Attempt()`. recorder: a journal, or none. watch: see
    `ring`."""
    runner = Runner(
        engine,
        workflow or Attempt(),
        TaskStream([Task(f"task {i}", "") for i in range(TASKS)], seed),
        TrajectoryQueue(groups_per_step, max_staleness, window),
        group_size=group_size,
        seed=seed,
        episode_seconds=DAY * 365,
        recorder=recorder,
    )
    return run(ring(Rollout(runner), trainer, steps, watch))[0]
