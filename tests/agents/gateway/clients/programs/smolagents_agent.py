"""A tool-calling agent of smolagents: python smolagents_agent.py chat PROMPT."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


_, prompt = sys.argv[1:]
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run(prompt))
