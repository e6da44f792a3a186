"""Tools of MCP servers (modelcontextprotocol.io): started here, or reached at an address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import gin

from areal_x import background
from areal_x.errors import UserError, nearest, positive
from areal_x.rollout.tools import Schema, Tool, ToolError, schema_of
from areal_x.waits import waiting, whose


@gin.configurable("mcp_server")
@dataclass(frozen=True)
class McpServer:
    """The tools of an MCP server. Needs the package `mcp` (pip install 'areal-x[mcp]').

    command: that starts it, with its arguments, as ("npx", "-y", "some-server"); it is ended with the run. Or url: of one that
    runs, as "http://127.0.0.1:8000/mcp". variables: names of environment variables that the command gets beside HOME and PATH.
    key_variable: the environment variable that holds the key for the url. only: the names of the tools that models get; by
    default all. prefix: put before their names, so that two servers can have tools of one name.
    start_seconds: longest time until it lists its tools.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    variables: tuple[str, ...] = ()
    key_variable: str = ""
    only: tuple[str, ...] = ()
    prefix: str = ""
    start_seconds: float = 60.0
    connection: Connection = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise UserError(
                "mcp_server needs a command that starts the server, or the url of one that runs: set one of the two"
            )
        if isinstance(self.command, str):
            raise UserError(
                f"mcp_server.command = {self.command!r} cannot work: write its words one by one, as ('npx', '-y', 'x')"
            )
        positive("mcp_server.start_seconds", self.start_seconds)
        object.__setattr__(self, "connection", Connection(self))

    async def setup(self) -> Sequence[Tool]:
        listed = await self.connection.open()
        names = [tool.name for tool in listed]
        for name in self.only:
            if name not in names:
                raise UserError(f"mcp_server.only names {name!r}, but the server has {', '.join(names)}{nearest(name, names)}")
        return [
            McpTool(self.connection, tool.name, schema_of(self.prefix + tool.name, tool.description or "", tool.input_schema))
            for tool in listed
            if not self.only or tool.name in self.only
        ]

    async def close(self) -> None:
        await self.connection.close()


@dataclass(frozen=True)
class McpTool:
    """One tool of a server. own_name: there."""

    connection: Connection
    own_name: str
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def call(self, arguments: dict[str, Any]) -> str:
        result = await self.connection.call(self.own_name, arguments)
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        if result.is_error:
            raise ToolError(f"The tool {self.name} failed: {text}")
        return text


class Connection:
    """To one server, held by a task of its own, as what opens it must close it. Opened anew for a call when it was lost."""

    def __init__(self, server: McpServer) -> None:
        self._server, self._name = server, " ".join(server.command) or server.url
        self._opening = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._client: Any = None

    async def open(self) -> list[Any]:
        """What the server lists. Raises UserError where it cannot be reached."""
        async with self._opening:
            await self._open()
            tools, cursor = [], None
            with waiting(whose(), "the MCP server to list its tools", self._name):
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        async with self._opening:
            await self._open()
        client = self._client
        try:
            with waiting(whose(), "the MCP server to answer", f"{self._name}, tool {name}"):
                return await client.call_tool(name, arguments)
        except Exception as error:
            if _is_closed(error) and client is self._client:
                await self.close()
            raise

    async def close(self) -> None:
        task, self._task = self._task, None
        self._end.set()
        if task is not None:
            with waiting(whose(), "the MCP server to end", self._name):
                await asyncio.wait([task])
            with suppress(BaseException):  # of a server that was gone before
                task.result()

    async def _open(self) -> None:
        if self._task is not None and not self._task.done():
            return
        self._end = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A connection that is lost is opened again by the next call.
        self._task = background.start(self._hold(ready, self._end), "the connection to an MCP server", failed=lambda _: None)
        try:
            async with asyncio.timeout(self._server.start_seconds):
                with waiting(whose(), "the MCP server to start", self._name):
                    self._client = await ready
        except ImportError:
            raise UserError("mcp_server needs the package mcp: pip install 'areal-x[mcp]'") from None
        except BaseException as error:
            self._task.cancel()
            await self.close()
            if not isinstance(error, Exception) or isinstance(error, UserError):
                raise
            seconds = f"did not answer within {self._server.start_seconds:g} seconds"
            reason = seconds if isinstance(error, TimeoutError) else f"cannot be reached ({_sentence(error)})"
            raise UserError(f"the MCP server {self._name!r} {reason}") from None

    async def _hold(self, ready: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Keeps the connection until the end is wanted, or it is lost."""
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.streamable_http import streamable_http_client

            server = self._server
            async with AsyncExitStack() as stack:
                if server.command:
                    environment = {name: os.environ[name] for name in server.variables if name in os.environ}
                    words = list(server.command)
                    to: Any = StdioServerParameters(command=words[0], args=words[1:], env=environment)
                else:
                    http = await stack.enter_async_context(_http_client(server.key_variable))
                    to = streamable_http_client(server.url, http_client=http)
                client = await stack.enter_async_context(Client(to))
                if not ready.done():  # else nobody waits for it any more
                    ready.set_result(client)
                await end.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
            raise


def _http_client(key_variable: str) -> Any:
    import httpx2

    if key_variable and key_variable not in os.environ:
        raise UserError(f"mcp_server.key_variable = {key_variable!r} cannot work: there is no such environment variable")
    headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else {}
    return httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=300.0))


def _is_closed(error: Exception) -> bool:
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code == CONNECTION_CLOSED


def _sentence(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
