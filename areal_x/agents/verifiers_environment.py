"""Environments of the package `verifiers`: their tasks, and an agent that runs them unchanged and
returns their reward.

    train.dataset = @verifiers_tasks()
    verifiers_tasks.environment = "my-environment"   # an installed environment, or since 0.4 a taskset
    train.workflow = @agent()
    agent.solve = @verifiers_agent

An environment reaches the model at a session of the run's gateway. Versions 0.1.14 to 0.3 have
environments with a rubric; 0.4 has tasksets, harnesses and runtimes
(areal_x.agents.verifiers_tasksets), among them those of OpenEnv, NeMo Gym and Harbor.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import gin

from areal_x.agents import verifiers_tasksets
from areal_x.errors import UserError, at_least, one_of
from areal_x.types import Task

# key of a task's metadata: the environment and its arguments, as `_environment` takes them
ABOUT = "verifiers"
NEEDED = "pip install 'verifiers>=0.1.14'"


@gin.configurable
def verifiers_tasks(
    environment: str,
    split: Literal["train", "test"] = "train",
    size: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Returns the tasks of an environment of the package `verifiers`, for `agent.solve =
    @verifiers_agent`.

    Args:
        environment: Its name, for `verifiers.load_environment`; since 0.4 a taskset's id, as
            `--env.taskset.id`.
        split: "train" for its dataset, "test" for its evaluation dataset. Since 0.4 it is the
            taskset's own setting `split`, if it has one.
        size: Number of tasks, from the start of the dataset; by default all.
        arguments: The environment's own keyword arguments. Since 0.4 the settings below `env`:
            {"taskset": {…}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "docker"}}}.

    Raises: UserError if verifiers or the environment is not installed, and for arguments that the
    environment refuses.
    """
    one_of("verifiers_tasks.split", split, ("train", "test"))
    if size is not None:
        at_least("verifiers_tasks.size", size, 1)
    if verifiers_tasksets.installed():
        return verifiers_tasksets.tasks_of(environment, split, size, dict(arguments or {}))
    about = (environment, json.dumps(dict(arguments or {}), sort_keys=True))
    loaded = _environment(*about)
    rows = (loaded.get_dataset if split == "train" else loaded.get_eval_dataset)(n=size or -1)
    return [
        Task(
            f"{environment}/{split}/{number}",
            _messages(row["prompt"]),
            row.get("answer"),
            {ABOUT: about, "row": dict(row)},
        )
        for number, row in enumerate(rows)
    ]


@gin.configurable(denylist=["base_url", "api_key"])
async def verifiers_agent(task: Task, base_url: str, api_key: str) -> float:
    """Runs the task's environment against the model and returns its reward.

    The prompt, tools, turns and scoring are the environment's. Raises: RuntimeError for a rollout
    that the environment aborted.
    """
    if verifiers_tasksets.ABOUT in task.metadata:
        return await verifiers_tasksets.play(task, base_url, api_key)
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    from verifiers.clients import OpenAIChatCompletionsClient

    # loading certificates takes 20 ms, and most runs' own address has no TLS
    here = DefaultAsyncHttpxClient(verify=base_url.startswith("https:"))
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=here) as client:
        output = await _environment(*task.metadata[ABOUT]).run_rollout(
            task.metadata["row"], OpenAIChatCompletionsClient(client), "policy", {}
        )
    if output.get("error"):
        raise RuntimeError(
            f"the environment aborted the rollout: {output.get('error_chain') or output['error']}"
        )
    return float(output["reward"])


@cache
def _environment(name: str, arguments: str) -> Any:
    """Loads the environment once per process. arguments: JSON."""
    try:
        from verifiers import load_environment
    except ImportError as error:
        raise UserError(
            f"verifiers_tasks needs the package verifiers ({error}): {NEEDED}"
        ) from None
    try:
        with _signals_as_they_were():
            return load_environment(name, **json.loads(arguments))
    except Exception as error:  # of the environment, whatever it is
        reason = " ".join(str(error).split())
        raise UserError(
            f"verifiers_tasks.environment = {name!r} cannot be loaded ({reason}): install it, and"
            " check verifiers_tasks.arguments"
        ) from error


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """Restores the run's handlers of Ctrl-C and SIGTERM, which environments replace."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can replace handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _messages(prompt: Any) -> Any:
    """Returns the messages without the empty fields that a table of messages has."""
    if isinstance(prompt, str):
        return prompt
    return [
        {name: value for name, value in message.items() if value is not None} for message in prompt
    ]
