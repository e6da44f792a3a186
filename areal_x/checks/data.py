"""Whether the tasks can be read, and whether the reward judges one of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from areal_x.config import Config
from areal_x.errors import UserError
from areal_x.rewards.pool import RewardPool
from areal_x.rollout.loop import run
from areal_x.rollout.workflows import Workflow
from areal_x.types import Failed, Scored, Task, TimedOut


def load(config: Config, name: str) -> Sequence[Task]:
    """What `train.NAME` is bound to, made now as the run would make it."""
    tasks: Sequence[Task] = copy.deepcopy(config.value(name))  # gin calls a bound reference when it is copied
    return tasks


def readable(binding: str, tasks: Sequence[Task]) -> str:
    """Raises: UserError for no tasks, something else than tasks, and two different tasks of one id."""
    if len(tasks) == 0:
        raise UserError(f"{binding} has no tasks: give it at least one")
    different: dict[str, Task] = {}
    for task in tasks:
        if not isinstance(task, Task):
            wanted = "make each item an areal_x.types.Task(id, prompt)"
            raise UserError(f"{binding} holds a {type(task).__name__} and not tasks: {wanted}")
        other = different.setdefault(task.id, task)
        if (other.prompt, other.answer) != (task.prompt, task.answer):
            wanted = "give each an id of its own, by which journal and metrics tell them apart"
            raise UserError(f"{binding} has two different tasks with the id {task.id!r}: {wanted}")
    repeated = f", {len(different):,} of them different" if len(different) < len(tasks) else ""
    return f"{len(tasks):,} tasks{repeated}; the first is {tasks[0].id!r}"


def rewarding(workflow: Workflow) -> Any:
    """The workflow that has a reward function, this one or one that it is around; None where there is none."""
    inner: Any = workflow
    while inner is not None and not callable(getattr(inner, "reward", None)):
        inner = getattr(inner, "workflow", None)
    return inner


def reward_works(workflow: Any, task: Task) -> str:
    """Judges the task's own answer in a process, with the run's time limit.

    Raises: UserError where that raises, takes too long or gives no number.
    """
    text = task.answer if isinstance(task.answer, str) else ""
    pool = RewardPool(workflow.reward, 1, workflow.reward_timeout_seconds, workflow.reward_limits)

    async def judge() -> Any:
        try:
            return await pool.score(task, text)
        finally:
            await pool.close()

    name = getattr(workflow.reward, "__qualname__", repr(workflow.reward))
    match run(judge(), "reward"):
        case Scored(reward):
            what = "its own answer" if text else "an empty text"
            return f"{name} gives {reward:g} for {what} to task {task.id!r}"
        case Failed(error):
            raise UserError(f"{name} failed on task {task.id!r} ({error}): every episode would; mend it or the task")
        case TimedOut(limit):
            binding = getattr(workflow, "binding", type(workflow).__name__)
            wanted = f"make it faster, or raise {binding}.reward_timeout_seconds"
            raise UserError(f"{name} was not done with task {task.id!r} after {limit:g} seconds: {wanted}")
        case other:
            raise AssertionError(other)
