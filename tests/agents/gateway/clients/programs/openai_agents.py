"""An agent of the OpenAI Agents SDK, with a tool: python openai_agents.py chat|responses PROMPT."""

import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


api, prompt = sys.argv[1:]
kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
set_tracing_disabled(True)
agent = Agent(name="adder", instructions="Add.", model=kind("policy", AsyncOpenAI()), tools=[add])
print(Runner.run_sync(agent, prompt).final_output)
