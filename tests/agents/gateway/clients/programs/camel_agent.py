"""An agent of CAMEL, with a tool: python camel_agent.py chat PROMPT."""

import os
import sys

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Characters(BaseTokenCounter):
    """CAMEL's own counter downloads a vocabulary."""

    def count_tokens_from_messages(self, messages):
        return sum(len(str(message)) for message in messages)

    def encode(self, text):
        return [*map(ord, text)]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a (int): One.
        b (int): The other.

    Returns:
        str: Their sum.
    """
    return str(a + b)


_, prompt = sys.argv[1:]
model = ModelFactory.create(
    ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    "policy",
    url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    token_counter=Characters(),
)
print(ChatAgent("Add.", model=model, tools=[FunctionTool(add)]).step(prompt).msgs[-1].content)
