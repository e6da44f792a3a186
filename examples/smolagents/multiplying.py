"""A tool-calling smolagents agent that multiplies, written for any OpenAI-compatible endpoint."""

from __future__ import annotations

import math
from typing import Any

import gin

from areal_x import Task

STEPS = 3  # replies of the model in which it may call the tool


@gin.configurable(module="multiplying")
def with_smolagents(task: Task, base_url: str, api_key: str) -> str:
    """Runs the agent and returns its final answer."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent

    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[multiplier()], model=model, max_steps=STEPS, verbosity_level=LogLevel.OFF
    )
    return str(agent.run(task.prompt[-1]["content"]))


def multiplier() -> Any:
    from smolagents import tool

    @tool
    def multiply(factors: str) -> str:
        """Multiplies whole numbers.

        Args:
            factors: The numbers with * between them, as 12*34.
        """
        return str(math.prod(map(int, factors.split("*"))))

    return multiply
