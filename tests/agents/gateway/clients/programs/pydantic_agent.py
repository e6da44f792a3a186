"""An agent of pydantic-ai, with a tool and a stream: python pydantic_agent.py chat|responses|messages PROMPT."""

import asyncio
import sys

from pydantic_ai import Agent

api, prompt = sys.argv[1:]
prefix = {"chat": "openai-chat", "responses": "openai-responses", "messages": "anthropic"}[api]
agent = Agent(f"{prefix}:policy", instructions="Add.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def streamed(_, events) -> None:
    async for _ in events:
        pass


async def main() -> None:
    print((await agent.run(prompt, event_stream_handler=streamed)).output)


asyncio.run(main())
