"""A CAMEL agent that multiplies with a tool, written for any OpenAI-compatible endpoint. Prints its
answer.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py "417*86="
"""

from __future__ import annotations

import math
import os
import sys

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Characters(BaseTokenCounter):
    """Counts characters as tokens: CAMEL's own counter, which detects histories that are too long,
    downloads a vocabulary."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return sum(len(str(message)) for message in messages)

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def multiply(factors: str) -> str:
    """Multiplies whole numbers.

    Args:
        factors (str): The numbers with * between them, as 12*34.

    Returns:
        str: Their product.
    """
    return str(math.prod(map(int, factors.split("*"))))


def main(question: str) -> None:
    model = ModelFactory.create(
        ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        "policy",
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        token_counter=Characters(),
    )
    agent = ChatAgent(model=model, tools=[FunctionTool(multiply)], max_iteration=3)
    print(agent.step(question).msgs[-1].content, end="")


if __name__ == "__main__":
    main(sys.argv[1])
