"""What a model may call: functions of yours, a calculator, programs in the sandbox, MCP servers.

    toolbox = Toolbox([weather, calculator(), python_executor(), mcp_server(command=("my-server",))])
    await toolbox.setup()
    reply = await model(messages, tools=toolbox.schemas)
    text = await toolbox.call("weather", '{"city": "Oslo"}')
    await toolbox.close()

A tool's mistakes and the model's are sentences that the model reads, never errors of the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import gin

from areal_x.agents.json_checks import json_bounds, schemas
from areal_x.errors import UserError, at_least, nearest, positive, sentence
from areal_x.protocols.engine import EngineError
from areal_x.runtime.thread import in_thread
from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.pool import Sandbox, SandboxLimits, shorten

# {"type": "function", "function": {"name", "description", "parameters"}}, as OpenAI has it
Schema = Mapping[str, Any]


class ToolError(Exception):
    """Why a tool could not do what it was asked: the sentence is shown to the model as it is."""


@runtime_checkable
class Tool(Protocol):
    """One thing that a model may call.

    name: also in the schema. schema: OpenAI's. limits_itself: that it answers in time by itself, so
    that the toolbox does not end it: for tools whose callers wait for each other.
    """

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    async def call(self, arguments: dict[str, Any]) -> str:
        """arguments: those of the schema. Raises what it likes: the model is told; ToolError is
        told as it is."""
        ...


@runtime_checkable
class ToolSource(Protocol):
    """What has to be started before there are tools; then it has one or several."""

    async def setup(self) -> Sequence[Tool]:
        """Safe to call twice. Raises UserError where it cannot work."""
        ...

    async def close(self) -> None:
        """Ends what `setup` began. Safe to call twice."""
        ...


@dataclass(frozen=True)
class FunctionTool:
    """A function that a model may call (see `tool_of`)."""

    function: Callable[..., Any]
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def call(self, arguments: dict[str, Any]) -> str:
        if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
            result = await self.function(**arguments)
        else:
            result = await in_thread(self.function, **arguments)
            if inspect.isawaitable(result):
                result = await result
        if isinstance(result, str):
            return result
        # which may be as large as it likes
        return await in_thread(json.dumps, result, ensure_ascii=False, default=str)


def tool_of(function: Callable[..., Any]) -> FunctionTool:
    """A tool of any function, async or not, that has type hints and a docstring of Google's kind
    with each argument in it.

    One that blocks is run in a thread. What it returns is shown as it is where it is a text, else
    as JSON. Raises UserError where no schema can be made of it.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", repr(function))
    try:
        schema = get_json_schema(function)
    except Exception as error:  # of transformers' own, several kinds
        reason = " ".join(str(error).split())
        raise UserError(
            f"the function {name} cannot be a tool ({reason}): give every argument a type hint and"
            " a line below `Args:` in the docstring"
        ) from None
    schema["function"].pop("return", None)
    return FunctionTool(function, schema)


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


@dataclass(frozen=True)
class PythonTool:
    """Runs a program in the sandbox (see `python_executor`)."""

    sandbox: Sandbox
    name: str = "python"
    limits_itself: bool = True  # its time does not count while it waits for a place in the sandbox

    @property
    def schema(self) -> Schema:
        description = (
            "Runs a Python program and returns what it prints, and the value of its last line if"
            " that is an expression. Each call starts anew: variables and files of earlier calls"
            " are gone. There is no network."
        )
        code = {"type": "string", "description": "The program."}
        return tool_schema(
            self.name,
            description,
            {"type": "object", "properties": {"code": code}, "required": ["code"]},
        )

    async def call(self, arguments: dict[str, Any]) -> str:
        return (await self.sandbox.run(arguments["code"])).text()


@gin.configurable("python_executor")
@dataclass(frozen=True)
class PythonExecutor:
    """The tool `python`: a program of the model, run in the sandbox (docs/sandbox.md). Each call is
    a new process.

    limits: of each program. workers: programs at once. packages: programs can import what is
    installed beside the run. imports: modules imported in advance, so that programs which use them
    start faster.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    workers: int = 4
    packages: bool = True
    imports: tuple[str, ...] = ()
    sandbox: Sandbox = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        at_least("python_executor.workers", self.workers, 1)
        sandbox = Sandbox(
            self.limits, self.workers, echo_last=True, packages=self.packages, imports=self.imports
        )
        object.__setattr__(self, "sandbox", sandbox)

    async def setup(self) -> Sequence[Tool]:
        await self.sandbox.start()
        return [PythonTool(self.sandbox)]

    async def close(self) -> None:
        await self.sandbox.close()


class Toolbox:
    """The tools of an episode, or of many at once.

    tools: `Tool`s, `Source`s, and functions (see `tool_of`). tool_seconds: after which the model is
    told that a tool did not answer; one that blocks in a thread goes on there, unheard.
    result_characters: of what a tool answers; of more, the first and the last half are shown.

    Raises UserError for functions that cannot be tools, and for two tools of one name.
    """

    def __init__(
        self,
        tools: Sequence[Tool | ToolSource | Callable[..., Any]],
        tool_seconds: float = 30.0,
        result_characters: int = 16_000,
    ) -> None:
        positive("tool_seconds", tool_seconds)
        at_least("result_characters", result_characters, 16)
        self.tool_seconds, self.result_characters = tool_seconds, result_characters
        self._given = [
            tool if isinstance(tool, Tool | ToolSource) else tool_of(tool) for tool in tools
        ]
        self._tools: dict[str, Tool] = {}
        self._starting = asyncio.Lock()
        self._ready = False
        for tool in self._given:
            if isinstance(tool, Tool):
                self._add(tool, schemas.trusted_schema_error(parameters_of(tool)))

    async def setup(self) -> None:
        """Starts what has to be started. Safe to call twice. Raises UserError where something
        cannot work."""
        if self._ready:
            return
        async with self._starting:
            if self._ready:
                return
            try:
                for source in self._given:
                    if isinstance(source, ToolSource):
                        for tool in await source.setup():
                            self._add(tool, await schemas.schema_error(parameters_of(tool)))
            except BaseException:
                await self.close()
                raise
            self._ready = True

    async def close(self) -> None:
        """Ends what `setup` began. Safe to call twice."""
        self._ready = False
        self._tools = {tool.name: tool for tool in self._given if isinstance(tool, Tool)}
        for source in self._given:
            if isinstance(source, ToolSource):
                await source.close()

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """Of all tools, in the order in which they were given; those of a `Source` are known after
        `setup`."""
        return tuple(tool.schema for tool in self._tools.values())

    async def call(self, name: str, arguments: str) -> str:
        """What the tool answers, or a sentence that says what was wrong. arguments: JSON, as the
        model wrote it.

        Raises only what ends the run: UserError and EngineError of a tool.
        """
        await self.setup()
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return (
                f"There is no tool {name!r}; the tools are:"
                f" {known}{nearest(name, list(self._tools))}."
            )
        try:
            parsed = json_bounds.loads(arguments or "{}")
        except ValueError as error:
            return f"The arguments of {name} are not valid JSON ({error}): write one JSON object."
        tool = self._tools[name]
        if wrong := await schemas.arguments_mismatch(parameters_of(tool), arguments or "{}"):
            return f"The arguments of {name} do not fit: {wrong}."
        text = await self._answer(tool, parsed)
        return shorten(text, "", False, self.result_characters)[0]

    async def _answer(self, tool: Tool, arguments: dict[str, Any]) -> str:
        own = getattr(tool, "limits_itself", False)
        try:
            async with asyncio.timeout(None if own else self.tool_seconds) as limit:
                with waiting(whose(), f"its tool {tool.name}"):
                    return str(await tool.call(arguments))
        except (UserError, EngineError):
            raise
        except ToolError as error:
            return sentence(error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return f"The tool {tool.name} did not answer within {self.tool_seconds:g} seconds."
            reason = " ".join(sentence(error).split())
            return (
                f"The tool {tool.name} failed:"
                f" {type(error).__name__}{': ' if reason else ''}{reason}"
            )

    def _add(self, tool: Tool, wrong: str | None) -> None:
        if tool.name in self._tools:
            raise UserError(
                f"two tools are called {tool.name!r}: rename one, so that a model can say which it"
                " means"
            )
        if wrong is not None:
            raise UserError(f"the parameters of the tool {tool.name!r} are no JSON schema: {wrong}")
        self._tools[tool.name] = tool


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    return tool.schema["function"].get("parameters") or {"type": "object"}
