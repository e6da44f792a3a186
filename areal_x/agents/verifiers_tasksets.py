"""Tasksets of `verifiers` 0.4: each task is played by the taskset's own environment, harness and
runtime, whose model is a session of the run's gateway.

`verifiers` ships tasksets of OpenEnv environments, NeMo Gym environments and Harbor tasks, and
harnesses such as mini-swe-agent, Codex and Claude Code: a setting names each.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from itertools import islice
from statistics import fmean
from typing import Any

from areal_x.errors import UserError
from areal_x.types import Task

ABOUT = "verifiers_taskset"  # key of a task's metadata
# of each agent, if nothing else is said: a conversation, whose program runs on this machine
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def installed() -> bool:
    """True if the version of verifiers that is installed has tasksets."""
    try:
        return find_spec("verifiers.v1") is not None and find_spec("verifiers.types") is None
    except (ImportError, ValueError):  # no verifiers at all
        return False


def tasks_of(taskset: str, split: str, size: int | None, settings: dict[str, Any]) -> list[Task]:
    """Returns the tasks of a taskset. settings: those below `env`.

    Raises: UserError for a taskset that is not installed, and for settings that it refuses.
    """
    own = {"id": taskset, **settings.get("taskset", {})}
    try:
        from verifiers.v1.utils.loaders import taskset_config_type

        if "split" in taskset_config_type(taskset).model_fields:
            own.setdefault("split", split)
        elif split != "train":
            raise ValueError(
                "the taskset has no setting `split`: choose its tasks in verifiers_tasks.arguments"
            )
        about = (json.dumps({**settings, "taskset": own}, sort_keys=True), size)
        loaded = _loaded(*about)
    except Exception as error:  # of the taskset, whatever it is
        reason = " ".join(str(error).split())
        raise UserError(
            f"verifiers_tasks.environment = {taskset!r} cannot be loaded ({reason}): install it, and"
            " check verifiers_tasks.arguments"
        ) from error
    return [
        Task(
            f"{taskset}/{split}/{number}",
            _prompt(task.data.prompt),
            metadata={ABOUT: about, "number": number},
        )
        for number, task in enumerate(loaded)
    ]


async def play(task: Task, base_url: str, api_key: str) -> float:
    """Runs one episode of a task and returns the reward: the mean over the agents that are to be
    trained.

    Raises: RuntimeError for an episode that failed.
    """
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment

    settings, size = task.metadata[ABOUT]
    # its own: one environment serves one endpoint
    environment = load_environment(_config(settings))
    client = vf.EvalClientConfig(
        base_url=base_url, api_key_var="AREAL_X_NO_KEY", headers={"x-api-key": api_key}
    )
    context = vf.ModelContext(model="policy", client=client)
    async with environment.serving():
        episode = await environment.run_episode(
            _loaded(settings, size)[task.metadata["number"]], context
        )
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"the environment aborted the episode: {reason}")
    return fmean(trace.reward for trace in episode.traces if trace.agent.trainable)


@cache
def _loaded(settings: str, size: int | None) -> list[Any]:
    """Loads the tasks once per process. settings: JSON."""
    from verifiers.v1.utils.loaders import load_environment

    taskset = load_environment(_config(settings)).taskset
    if size is None and not taskset.bounded:
        raise ValueError("the taskset never ends: set verifiers_tasks.size")
    return list(islice(iter(taskset), size))


def _config(settings: str) -> Any:
    from verifiers.v1 import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    given = json.loads(settings)
    fields = env_config_type(given["taskset"]["id"], given.get("id", "")).model_fields
    seats = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
    return resolve_env_config(
        {**given, **{name: {**SEAT, **given.get(name, {})} for name in seats}}
    )


def _prompt(prompt: Any) -> Any:
    """Returns a prompt as a task's: a text, or messages without empty fields."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return [message.model_dump(exclude_none=True) for message in prompt]
