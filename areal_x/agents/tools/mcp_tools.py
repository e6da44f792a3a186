"""Tools of MCP servers (modelcontextprotocol.io): started by the run, or reached at a URL."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import gin

from areal_x.agents.external_program import inherited_environment
from areal_x.agents.json_checks import json_bounds
from areal_x.agents.tools.mcp_worker import LINE
from areal_x.agents.tools.toolbox import Schema, Tool, ToolError, tool_schema
from areal_x.errors import UserError, nearest, positive
from areal_x.runtime import background, guard
from areal_x.runtime.waits import waiting, whose

MODULE = "areal_x.agents.tools.mcp_worker"
LOST = "the connection to it was lost"
END_SECONDS = 10.0  # for the server to end by itself, by MCP's own shutdown


class McpError(Exception):
    """An error that a server reported."""


@gin.configurable("mcp_server")
@dataclass(frozen=True)
class McpServer:
    """The tools of an MCP server. Needs the package `mcp` (pip install 'areal-x[mcp]'). Set either
    `command` or `url`."""

    command: tuple[str, ...] = ()
    """The command that starts the server, with its arguments, such as ("npx", "-y", "some-server");
    it ends with the run."""
    url: str = ""
    """The URL of a running server, such as "http://127.0.0.1:8000/mcp"."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the command inherits beside HOME and PATH."""
    key_variable: str = ""
    """The environment variable that holds the key for the URL."""
    only: tuple[str, ...] = ()
    """Names of the tools that models may call; by default all."""
    prefix: str = ""
    """Prepended to the tools' names, so that two servers can have tools of the same name."""
    start_seconds: float = 60.0
    """Timeout until the server has listed its tools."""
    connection: McpConnection = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise UserError(
                "mcp_server needs either a command that starts the server or the url of a running"
                " one: set one of the two"
            )
        if isinstance(self.command, str):
            raise UserError(
                f"mcp_server.command = {self.command!r} cannot work: write its words one by one, as"
                " ('npx', '-y', 'x')"
            )
        positive("mcp_server.start_seconds", self.start_seconds)
        object.__setattr__(self, "connection", McpConnection(self))

    async def setup(self) -> Sequence[Tool]:
        listed = await self.connection.open()
        names = [tool["name"] for tool in listed]
        for name in self.only:
            if name not in names:
                raise UserError(
                    f"mcp_server.only names {name!r}, but the server has"
                    f" {', '.join(names)}{nearest(name, names)}"
                )
        return [
            McpTool(
                self.connection,
                tool["name"],
                tool_schema(self.prefix + tool["name"], tool["description"], tool["parameters"]),
            )
            for tool in listed
            if not self.only or tool["name"] in self.only
        ]

    async def close(self) -> None:
        await self.connection.close()


@dataclass(frozen=True)
class McpTool:
    """One tool of a server. own_name: its name there."""

    connection: McpConnection
    own_name: str
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def call(self, arguments: dict[str, Any]) -> str:
        answer = await self.connection.call(self.own_name, arguments)
        if answer["failed"]:
            raise ToolError(f"The tool {self.name} failed: {answer['text']}")
        return str(answer["text"])


class McpConnection:
    """The connection to one server, held by a process of its own (areal_x.agents.tools.mcp_worker).
    If it is lost, the next call opens it again."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._name = " ".join(server.command) or server.url
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tools: list[dict[str, Any]] = []
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()

    async def open(self) -> list[dict[str, Any]]:
        """Returns the tools that the server lists, each with name, description and parameters.
        Raises: UserError if the server cannot be reached."""
        async with self._lock:
            await self._open()
            return self._tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the text of the answer, and whether it reports a failure. Raises: McpError."""
        async with self._lock:
            await self._open()
            process = self._process
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._send({"call": number, "tool": tool, "arguments": arguments})
            with waiting(whose(), "the MCP server to answer", f"{self._name}, tool {tool}"):
                answer: dict[str, Any] = await future
        finally:
            if self._pending.pop(number, None) is not None:  # the call was cancelled
                self._send({"cancel": number})
        if answer.get("lost"):
            async with self._lock:
                if self._process is process:
                    await self.close()
        if "error" in answer:
            raise McpError(answer["error"])
        return answer

    async def close(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with waiting(whose(), "the MCP server to end", self._name):
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            if self._reading is not None:
                await asyncio.wait([self._reading])

    async def _open(self) -> None:
        if (
            self._process is not None
            and self._process.returncode is None
            and self._reading
            and not self._reading.done()
        ):
            return
        await self.close()
        if importlib.util.find_spec("mcp") is None:
            raise UserError("mcp_server needs the package mcp: pip install 'areal-x[mcp]'")
        key = self._server.key_variable
        if key and key not in os.environ:
            raise UserError(
                f"mcp_server.key_variable = {key!r} cannot work: there is no such environment"
                " variable"
            )
        try:
            async with asyncio.timeout(self._server.start_seconds):
                with waiting(whose(), "the MCP server to start", self._name):
                    self._process = process = await self._started()
                    await read_message(process)
                with waiting(whose(), "the MCP server to list its tools", self._name):
                    self._tools = []
                    while tool := (await read_message(process)).get("tool"):
                        self._tools.append(tool)
        except BaseException as error:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            await self.close()
            if not isinstance(error, McpError | TimeoutError | ValueError | OSError):
                raise
            seconds = f"did not answer within {self._server.start_seconds:g} seconds"
            reason = seconds if isinstance(error, TimeoutError) else f"cannot be reached ({error})"
            raise UserError(f"the MCP server {self._name!r} {reason}") from None
        # The next call opens a lost connection again.
        self._reading = background.start(
            self._read(process), "the connection to an MCP server", failed=lambda _: None
        )

    async def _started(self) -> asyncio.subprocess.Process:
        server = self._server
        settings = {
            "command": server.command,
            "url": server.url,
            "variables": server.variables,
            "key_variable": server.key_variable,
        }
        return await asyncio.create_subprocess_exec(
            *guard.command(MODULE, sys.path, settings, os.getpid()),
            env=inherited_environment((*server.variables, server.key_variable)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE,
            start_new_session=True,  # an interrupt at the terminal is the run's to handle
        )

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Delivers the answers to their calls, until the connection ends."""
        try:
            while True:
                answer = await read_message(process)
                self._answer(answer["call"], answer)
        finally:
            for number in list(self._pending):
                self._answer(number, {"error": LOST})

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        future = self._pending.pop(number, None)
        if future is not None and not future.done():  # otherwise the call was cancelled
            future.set_result(answer)

    def _send(self, message: dict[str, Any]) -> None:
        if (
            self._process is not None
            and self._process.stdin is not None
            and not self._process.stdin.is_closing()
        ):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")


async def read_message(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Returns the process's next message. Raises: McpError if it reports that there is no server,
    or none any more."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    message: dict[str, Any] = json_bounds.loads(line) if line else {"refused": LOST}
    if "refused" in message:
        raise McpError(message["refused"])
    return message
