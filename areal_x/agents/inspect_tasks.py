"""Tasks of inspect-ai: their samples as a dataset, and an agent that evaluates one with its task's own
solver and scorer.

    train.evaluations = [@gpqa/evaluation_set()]
    gpqa/evaluation_set.name = "gpqa"
    gpqa/evaluation_set.dataset = @inspect_tasks()
    gpqa/evaluation_set.workflow = @agent()
    agent.solve = @inspect_agent
    inspect_tasks.task = "inspect_evals/gpqa_diamond"    # or "my_task.py@name"
    inspect_tasks.python = "venv/bin/python"             # that has inspect-ai and the task

Each sample runs in a process of that Python, whose packages may be others than a run's. The model is
reached as an OpenAI-compatible server at a session of the run's gateway.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.package_programs import listed, played
from areal_x.errors import at_least
from areal_x.types import Task

ABOUT = "inspect"  # key of a task's metadata
PROGRAM = str(Path(__file__).with_name("inspect_program.py"))


@gin.configurable
def inspect_tasks(
    task: str,
    arguments: Mapping[str, Any] | None = None,
    size: int | None = None,
    scorer: str | None = None,
    python: str | None = None,
    variables: tuple[str, ...] = (),
) -> list[Task]:
    """Returns a task for each sample of an inspect-ai task, for `agent.solve = @inspect_agent`.

    Args:
        task: As `inspect eval` takes it: a registered name, or a file and a function,
            "my_task.py@name".
        arguments: The task's own.
        size: Number of samples, from the first; by default all.
        scorer: Name of the score that is the reward; by default the first. Of a score with several
            values, the mean.
        python: The Python that has inspect-ai and the task; by default this one.
        variables: Names of the run's environment variables that the task needs, such as a token.

    Raises: UserError if inspect-ai is missing there or the task cannot be loaded.
    """
    if size is not None:
        at_least("inspect_tasks.size", size, 1)
    about = {
        "task": task,
        "arguments": dict(arguments or {}),
        "scorer": scorer,
        "python": python or sys.executable,
        "variables": list(variables),
    }
    found = listed(PROGRAM, about, f"inspect_tasks.task = {task!r}", "inspect-ai and the task")
    return [
        Task(f"{task}/{sample}", "", metadata={ABOUT: about, "sample": sample})
        for sample in found[:size]
    ]


@gin.configurable(denylist=["base_url", "api_key"])
async def inspect_agent(task: Task, base_url: str, api_key: str) -> float:
    """Evaluates a sample with its task's solver and returns its score as a number: C and I are 1 and
    0.

    Raises: RuntimeError for a sample that failed.
    """
    about, sample = task.metadata[ABOUT], task.metadata["sample"]
    try:
        result = await played(PROGRAM, about, sample, base_url, api_key)
    except RuntimeError as error:
        raise RuntimeError(f"inspect-ai could not evaluate the sample: {error}") from None
    return float(result["score"])
