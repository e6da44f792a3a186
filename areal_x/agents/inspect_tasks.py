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

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.external_program import inherited_environment
from areal_x.errors import UserError, at_least
from areal_x.types import Task

ABOUT = "inspect"  # key of a task's metadata
PROGRAM = str(Path(__file__).with_name("inspect_program.py"))
LIST_SECONDS = 600.0  # to load a task and its dataset
ERROR_CHARACTERS = 400


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
    python = python or sys.executable
    about = {
        "task": task,
        "arguments": dict(arguments or {}),
        "scorer": scorer,
        "python": python,
        "variables": list(variables),
    }
    try:
        done = subprocess.run(
            [python, PROGRAM],
            input=json.dumps(about),
            env=inherited_environment(variables),
            capture_output=True,
            text=True,
            timeout=LIST_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])["samples"] if not done.returncode else None
    except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        raise UserError(f"inspect_tasks.task = {task!r} cannot be loaded: {error}") from None
    if found is None:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given"
        raise UserError(
            f"inspect_tasks.task = {task!r} cannot be loaded ({reason[-ERROR_CHARACTERS:]}): install"
            f" inspect-ai and the task where {python} finds them"
        )
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
    about = task.metadata[ABOUT]
    request = {**about, "sample": task.metadata["sample"], "base_url": base_url}
    process = await asyncio.create_subprocess_exec(
        about["python"],
        PROGRAM,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**inherited_environment(about["variables"]), "INSPECT_KEY": api_key},
        start_new_session=True,
    )
    try:
        printed, complained = await process.communicate(json.dumps(request).encode())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    try:
        result = json.loads(printed.splitlines()[-1])
    except (ValueError, LookupError):
        result = {"error": complained.decode(errors="replace")[-ERROR_CHARACTERS:]}
    if "error" in result:
        raise RuntimeError(f"inspect-ai could not evaluate the sample: {result['error']}")
    return float(result["score"])
