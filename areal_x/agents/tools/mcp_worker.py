"""A process that holds the connection to an MCP server: what areal_x.agents.tools.mcp_tools starts.

    run ──(a line of JSON: a call, or that one is given up)──▶ worker ◀──MCP──▶ server
    run ◀──(a line: that it is connected, a tool, that all are told; a call's text)── worker

What a server answers may be of any size and shape, and to parse it takes the interpreter's lock.
Here that delays nobody but the server's own calls; what the run is told is short.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from areal_x.runtime import guard

CHARACTERS = 1 << 18  # of an answer, and of what a tool says of itself
LINE = 1 << 22  # bytes: such a text as JSON has it, and more than a call's arguments may be


def main(path: list[str], server: Mapping[str, Any], parent: int) -> None:
    """path: to import from. server: the fields of McpServer that say where it is. parent: this
    process ends with it."""
    guard.die_with_parent(parent)
    sys.path[:] = path
    told = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer

    def tell(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(told, data) :]

    asyncio.run(serve(server, tell))


async def serve(server: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Until the run closes its end, or the connection is lost."""
    listening = False
    try:
        async with AsyncExitStack() as stack:
            client = await connected(stack, server)
            tell({"connected": True})
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    tell({"tool": bounded(tool)})
                if (cursor := page.next_cursor) is None:
                    break
            listening = True
            tell({"listed": True})
            await calls(client, tell)
    except BaseException as error:
        if not listening:
            tell({"refused": sentence(error)})


async def connected(stack: AsyncExitStack, server: Mapping[str, Any]) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if server["command"]:
        command, *arguments = server["command"]
        environment = {name: os.environ[name] for name in server["variables"] if name in os.environ}
        return await stack.enter_async_context(
            Client(StdioServerParameters(command=command, args=arguments, env=environment))
        )
    import httpx2

    key = os.environ.get(server["key_variable"], "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=300.0))
    await stack.enter_async_context(http)
    return await stack.enter_async_context(
        Client(streamable_http_client(server["url"], http_client=http))
    )


def bounded(tool: Any) -> dict[str, Any]:
    """What a model is told of a tool."""
    told = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if (size := len(json.dumps(told))) > CHARACTERS:
        raise ValueError(
            f"what its tool {tool.name[:100]!r} says of itself has {size} characters, more than"
            f" {CHARACTERS}"
        )
    return told


async def calls(client: Any, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Each call as a task of its own, until the run has no more."""
    lines = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    running: dict[int, asyncio.Task[None]] = {}

    async def call(number: int, tool: str, arguments: dict[str, Any]) -> None:
        try:
            result = await client.call_tool(tool, arguments)
            text = "\n".join(
                block.text if block.type == "text" else f"[{block.type}]"
                for block in result.content
            )
            tell({"call": number, "text": shown(text), "failed": bool(result.is_error)})
        except Exception as error:
            tell({"call": number, "error": sentence(error), "lost": is_closed(error)})
            if is_closed(error):
                lines.set_exception(EOFError())  # nothing more can be asked
        finally:
            del running[number]

    async with asyncio.TaskGroup() as group:
        with suppress(EOFError):
            while line := await lines.readline():
                asked = json.loads(line)
                if "call" in asked:
                    number = asked["call"]
                    running[number] = group.create_task(
                        call(number, asked["tool"], asked["arguments"])
                    )
                elif given_up := running.get(asked["cancel"]):
                    given_up.cancel()
        for task in running.values():
            task.cancel()


def shown(text: str) -> str:
    return (
        text
        if len(text) <= CHARACTERS
        else f"{text[:CHARACTERS]} … ({len(text) - CHARACTERS} characters more)"
    )


def is_closed(error: Exception) -> bool:
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code == CONNECTION_CLOSED


def sentence(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:1000]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
