"""Claude Code by the Claude Agent SDK, with a tool of this process: python claude_sdk.py messages PROMPT."""

import asyncio
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Adds two numbers.", {"a": int, "b": int})
async def add(given):
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


async def main() -> None:
    options = ClaudeAgentOptions(
        model="policy",
        system_prompt="Add.",
        mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
        allowed_tools=["mcp__sums__add"],
        cli_path=os.environ.get("CLAUDE"),
    )
    async for message in query(prompt=sys.argv[2], options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
