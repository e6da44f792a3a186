"""Agents that add, written for any OpenAI-compatible endpoint: nothing in them depends on training.

Each receives a task, the address of a session and its key, and returns the reward.
"""

from __future__ import annotations

import gin

from areal_x import Task
from examples.arithmetic.task import verify

MODEL = "policy"  # sessions accept any model name


@gin.configurable(module="adding")
async def with_openai(task: Task, base_url: str, api_key: str) -> float:
    """Answers with the official OpenAI client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": str(task.prompt)}]
        )
    return verify(task, answer.choices[0].message.content or "")


@gin.configurable(module="adding")
async def with_agents_sdk(task: Task, base_url: str, api_key: str) -> float:
    """Answers with an agent of the OpenAI Agents SDK."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)  # it would report to OpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        adder = Agent(name="adder", model=OpenAIChatCompletionsModel(MODEL, client))
        result = await Runner.run(adder, str(task.prompt))
    return verify(task, str(result.final_output))
