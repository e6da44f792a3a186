"""A process that holds the connection to an MCP server, started by areal_x.agents.tools.mcp_tools.

    run ──(a line of JSON: a call, or a cancellation)──▶ worker ◀──MCP──▶ server
    run ◀──(a line: connected, a tool, end of the tools, or the text of a result)── worker

A server's answer may have any size and shape, and parsing it holds the interpreter's lock. Here
that delays only the server's own calls; messages to the run are short.
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

CHARACTERS = 1 << 18  # of a result, and of a tool's description
LINE = 1 << 22  # bytes: enough for such a text in JSON, and for any call's arguments


def main(path: list[str], server: Mapping[str, Any], parent: int) -> None:
    """path: sys.path. server: the fields of McpServer that locate it. parent: this process ends
    with it."""
    guard.die_with_parent(parent)
    sys.path[:] = path
    output = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the messages

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(output, data) :]

    asyncio.run(serve(server, send))


async def serve(server: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Runs until the run closes its end, or the connection is lost."""
    listening = False
    try:
        async with AsyncExitStack() as stack:
            client = await connected(stack, server)
            send({"connected": True})
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    send({"tool": describe(tool)})
                if (cursor := page.next_cursor) is None:
                    break
            listening = True
            send({"listed": True})
            await calls(client, send)
    except BaseException as error:
        if not listening:
            send({"refused": sentence(error)})


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


def describe(tool: Any) -> dict[str, Any]:
    """Returns what the model reads about a tool."""
    described = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if (size := len(json.dumps(described))) > CHARACTERS:
        raise ValueError(
            f"the description of its tool {tool.name[:100]!r} has {size} characters, more than"
            f" {CHARACTERS}"
        )
    return described


async def calls(client: Any, send: Callable[[Mapping[str, Any]], None]) -> None:
    """Runs each call as a task of its own, until the run sends no more."""
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
            send({"call": number, "text": shown(text), "failed": bool(result.is_error)})
        except Exception as error:
            send({"call": number, "error": sentence(error), "lost": is_closed(error)})
            if is_closed(error):
                lines.set_exception(EOFError())  # no more calls are possible
        finally:
            del running[number]

    async with asyncio.TaskGroup() as group:
        with suppress(EOFError):
            while line := await lines.readline():
                request = json.loads(line)
                if "call" in request:
                    number = request["call"]
                    running[number] = group.create_task(
                        call(number, request["tool"], request["arguments"])
                    )
                elif cancelled := running.get(request["cancel"]):
                    cancelled.cancel()
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
