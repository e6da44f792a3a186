"""The training loop around a fake engine and a fake trainer, on the virtual clock.

Runner, queue, journal and the order of publication are the real ones; generation and training only
take time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_x.batching.batch import staleness
from areal_x.monitor.step_metrics import describe_groups
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
    """One call of the engine with a prompt of `prompt_tokens` tokens; the reward is 1 if the first
    new token is even, else 0."""

    prompt_tokens: int = 100
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=2**20))

    async def run(self, task: Task, engine: Generator) -> list[Trajectory]:
        prompt = np.ones(self.prompt_tokens, np.int32)
        completion = await engine.generate(Request(prompt, self.sampling))
        return [
            Trajectory.from_completion(
                prompt,
                completion.tokens,
                completion.logprobs,
                completion.versions,
                reward=float(completion.tokens[0] % 2 == 0),
                finish_reason=completion.finish_reason,
            )
        ]


@dataclass
class FakeTrainer:
    """A trainer that only takes time."""

    step_seconds: Seconds = 0.0
    """Duration of a step, or a function of the groups that it trains on."""

    publish_seconds: float = 0.0
    """Time to stage weights, while generation continues."""

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
    """Runs the loop for `steps` steps; returns one row a step, with the keys of a run's metrics, in
    virtual seconds.

    As in a run, the trainer goes on while the engine takes its weights, and pause_seconds is of the
    version before. In addition, slot_seconds is the time that requests occupied slots of the
    engine, summed over slots.

    watch: called with the groups of each step. resumed: the state to resume from, at the trainer's
    version. save: called with the runner's state for a checkpoint after each step.
    """
    engine: FakeEngine = rollout.engine  # type: ignore[assignment]
    now = asyncio.get_running_loop().time
    await engine.start()
    try:
        rollout.resumed = resumed
        paused = await rollout.swap(engine.stage(trainer), trainer.version)
        publication: asyncio.Task[float] | None = None
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
            if publication is not None:
                paused = await publication
            await asyncio.sleep(trainer.publish_seconds)
            staged = engine.stage(trainer)
            publication = asyncio.create_task(rollout.swap(staged, trainer.version))
            row = {
                "step": trainer.version,
                **describe_groups(groups, ages),
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
        if publication is not None:
            await publication
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
    """Runs `ring` from the trainer's version on. The other settings are those of `train`.

    workflow: None for `Attempt()`. recorder: a journal, or None. watch: called with the groups of
    each step.
    """
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
