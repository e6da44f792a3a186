"""Checks that the tasks can be read, and that the reward scores one of them."""

from __future__ import annotations

import copy
import dis
from collections.abc import Sequence
from typing import Any

from areal_x.algorithms.parts import unwrapped
from areal_x.config.reader import Config
from areal_x.errors import UserError
from areal_x.protocols.workflow import Workflow
from areal_x.runtime.loop import run
from areal_x.types import Failed, Scored, Task, TimedOut

VARIED_TASKS = 2  # tasks for which sample texts are scored, to see whether the reward varies


def load_tasks(config: Config, name: str) -> Sequence[Task]:
    """Loads the tasks of `train.NAME` as the run would."""
    # gin calls a bound reference when it is copied
    tasks: Sequence[Task] = copy.deepcopy(config.value(name))
    return tasks


def check_tasks(binding: str, tasks: Sequence[Task]) -> str:
    """Raises: UserError if there are no tasks, for an item that is not a Task, and for two
    different tasks with the same id."""
    if len(tasks) == 0:
        raise UserError(f"{binding} has no tasks: give it at least one")
    different: dict[str, Task] = {}
    for task in tasks:
        if not isinstance(task, Task):
            wanted = "make each item an areal_x.types.Task(id, prompt)"
            raise UserError(
                f"{binding} contains a {type(task).__name__} instead of tasks: {wanted}"
            )
        other = different.setdefault(task.id, task)
        if (other.prompt, other.answer) != (task.prompt, task.answer):
            wanted = "give each its own id, which identifies it in journal and metrics"
            raise UserError(f"{binding} has two different tasks with the id {task.id!r}: {wanted}")
    repeated = f", {len(different):,} of them different" if len(different) < len(tasks) else ""
    return f"{len(tasks):,} tasks{repeated}; the first is {tasks[0].id!r}"


def find_rewarded(workflow: Workflow) -> Workflow | None:
    """Returns the workflow that has a reward function, this one or one that it wraps, or None."""
    inner: Workflow | None = workflow
    while inner is not None and inner.reward_function() is None:
        inner = inner.wrapped()
    return inner


def check_reward(workflow: Workflow, tasks: Sequence[Task], must_vary: bool = False) -> str:
    """Scores the first task's own answer in a worker process, with the run's time limit. must_vary:
    also score other texts, until two get different rewards.

    Raises: UserError if the reward raises an error, takes too long or does not return a number;
    and, if it must vary, if it cannot distinguish one answer from another.
    """
    task = tasks[0]
    own = task.answer if isinstance(task.answer, str) else ""
    seen: list[float] = []
    reward = workflow.reward_function()

    async def score() -> Any:
        pool = workflow.reward_processes(workers=1)
        assert pool is not None, "the workflow has a reward function"
        try:
            first = await pool.score(task, own)
            texts = (
                ((t, text) for t in tasks[:VARIED_TASKS] for text in sample_texts(t))
                if must_vary
                else ()
            )
            for other, text in texts:
                if not isinstance(first, Scored) or len({first.reward, *seen}) > 1:
                    break
                outcome = await pool.score(other, text)
                seen.extend([outcome.reward] if isinstance(outcome, Scored) else [])
            return first
        finally:
            await pool.close()

    name = getattr(reward, "__qualname__", repr(reward))
    match run(score(), "reward"):
        case Scored(value):
            what = "its own answer" if own else "an empty text"
            result = f"{name} gives {value:g} for {what} to task {task.id!r}"
            if not must_vary or len({value, *seen}) > 1:
                return result
            return f"{result}{check_constant_reward(reward, name, value, len(seen))}"
        case Failed(error):
            raise UserError(
                f"{name} failed on task {task.id!r} ({error}), as it would in every episode: fix"
                " it or the task"
            )
        case TimedOut(limit):
            binding = workflow.binding or type(workflow).__name__
            wanted = f"make it faster, or raise {binding}.reward_timeout_seconds"
            raise UserError(
                f"{name} did not finish task {task.id!r} within {limit:g} seconds: {wanted}"
            )
        case other:
            raise AssertionError(other)


def sample_texts(task: Task) -> tuple[str, ...]:
    """Texts that most rewards score differently: none, the task's answer in several formats, and
    other texts."""
    answer = task.answer if isinstance(task.answer, str | int | float) else 1
    prompt = (
        task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1].get("content", ""))
    )
    formats = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
    return (
        "",
        *(text.format(answer) for text in formats),
        "I think that the answer is 1, not 2.",
        prompt[:1000],
    )


def check_constant_reward(reward: Any, name: str, value: float, texts: int) -> str:
    """Returns a remark on a reward that was the same for all texts. Raises: UserError if it does
    not depend on the text, or if even an empty text has a positive reward."""
    if not reads_text(reward):
        raise UserError(
            f"{name} never reads the text that it scores, so all attempts at a task are equal:"
            " nothing would be learnt"
        )
    if texts and value > 0:
        raise UserError(
            f"{name} gives {value:g} for each of {texts} different texts, an empty one included: if"
            " all attempts are equal, nothing is learnt"
        )
    return (
        f", and the same for {texts} other texts: make sure that there are answers for which it"
        " gives more"
    )


def reads_text(reward: Any) -> bool:
    """True if the bytecode of a function (task, text) loads its second parameter, or if there is no
    bytecode to inspect."""
    code = getattr(unwrapped(reward), "__code__", None)
    if code is None or code.co_argcount < 2:
        return True
    loaded = (
        i.argval if isinstance(i.argval, tuple) else (i.argval,)
        for i in dis.get_instructions(code)
        if "LOAD" in i.opname
    )
    return any({code.co_varnames[1], "locals"} & set(names) for names in loaded)
