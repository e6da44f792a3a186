"""Lists the tasks of a domain of τ²-bench, or plays one of them with an agent at an address.

Runs in a Python that has the package, as areal_x.agents.package_main executes it, or imported by the
run. A request has domain, split, user, user_arguments, steps and errors, and for a task also id,
base_url and api_key.
"""

from __future__ import annotations

from typing import Any

MODEL = "openai/policy"  # any server that speaks OpenAI's protocol, for LiteLLM


def listed(request: dict[str, Any]) -> list[str]:
    """Returns the ids of the tasks: without a user, of those that an agent can do alone."""
    from tau2.agent.llm_agent import LLMSoloAgent

    tasks = loaded(request)
    alone = request["user"] is None
    return [task.id for task in tasks if not alone or LLMSoloAgent.check_valid_task(task)]


def play(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the reward, and how the conversation ended."""
    import litellm
    from tau2.run import run_task

    (task,) = (task for task in loaded(request) if task.id == request["id"])
    alone = request["user"] is None
    litellm.suppress_debug_info = True
    try:
        run = run_task(
            domain=request["domain"],
            task=task,
            agent="llm_agent_solo" if alone else "llm_agent",
            llm_agent=MODEL,
            llm_args_agent={"api_base": request["base_url"], "api_key": request["api_key"]},
            user="dummy_user" if alone else "user_simulator",
            llm_user=request["user"],
            llm_args_user=request["user_arguments"],
            max_steps=request["steps"],
            max_errors=request["errors"],
        )
    except litellm.ContextWindowExceededError as error:
        if error.model != MODEL.partition("/")[2]:
            raise  # the user's
        return {"reward": 0.0, "ended": "context"}  # as one that has too many steps
    return {"reward": run.reward_info.reward, "ended": str(run.termination_reason)}


def loaded(request: dict[str, Any]) -> list[Any]:
    """Returns the tasks of a split. Raises: KeyError for a domain, ValueError for a split that there
    is not."""
    from loguru import logger

    logger.disable("tau2")  # it logs each message
    from tau2.run import load_tasks

    return list(load_tasks(request["domain"], request["split"]))
