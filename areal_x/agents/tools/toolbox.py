"""Tools that a model may call: Python functions, a calculator, programs in the sandbox, MCP
servers.

    toolbox = Toolbox([weather, calculator(), python_executor(), mcp_server(command=("my-server",))])
    await toolbox.setup()
    reply = await model(messages, tools=toolbox.schemas)
    text = await toolbox.call("weather", '{"city": "Oslo"}')
    await toolbox.close()

Mistakes of a tool or of the model become sentences that the model reads, never errors of the
episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import gin

from areal_x.agents.json_checks import json_bounds, schemas
from areal_x.errors import UserError, at_least, nearest, positive, sentence
from areal_x.hf.image_reader import is_image
from areal_x.protocols.engine import EngineError
from areal_x.runtime.hosts import Hosts
from areal_x.runtime.thread import in_thread
from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.pool import Programs, Sandbox, SandboxLimits, SpreadSandbox, shorten

# OpenAI's {"type": "function", "function": {"name", "description", "parameters"}}
Schema = Mapping[str, Any]
Result = str | list[dict[str, Any]]  # of a tool: a text, or parts of content with images


class ToolError(Exception):
    """Why a tool failed: the model reads the message as it is."""


@runtime_checkable
class Tool(Protocol):
    """A tool that a model may call.

    name: the same as in the schema. schema: OpenAI's. limits_itself: True if it limits its own
    time, so that the toolbox sets no timeout: for tools whose callers wait for each other.
    """

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    async def call(self, arguments: dict[str, Any]) -> Result:
        """arguments: valid for the schema. May raise anything: the model reads the error; a
        ToolError's message as it is."""
        ...


@runtime_checkable
class ToolSource(Protocol):
    """Starts something that provides one or more tools."""

    async def setup(self) -> Sequence[Tool]:
        """Safe to call twice. Raises: UserError if it cannot work."""
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

    async def call(self, arguments: dict[str, Any]) -> Result:
        result: Any
        if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
            result = await self.function(**arguments)
        else:
            result = await in_thread(self.function, **arguments)
            if inspect.isawaitable(result):
                result = await result
        if isinstance(result, str):
            return result
        if shows(result):
            return list(result)
        # in a thread, since the result may be of any size
        return await in_thread(json.dumps, result, ensure_ascii=False, default=str)


def tool_of(function: Callable[..., Any]) -> FunctionTool:
    """Makes a tool of any function, async or not, with type hints and a Google-style docstring that
    describes each argument.

    A blocking function runs in a thread. A returned string is shown as it is, anything else as
    JSON.

    Raises: UserError if no schema can be derived from the function.

    A list of parts of content, some of them images ({"type": "image_url", …}), is shown to the model as
    such.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", repr(function))
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers raises several kinds
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

    sandbox: Programs
    name: str = "python"
    limits_itself: bool = True  # waiting for a place in the sandbox does not count as its time

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
    """The tool `python`: runs a program of the model in the sandbox (docs/sandbox.md), each call in
    a new process."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """What each program may use."""
    workers: int = 4
    """Most programs at once."""
    packages: bool = True
    """True if programs can import the packages installed beside the run."""
    imports: tuple[str, ...] = ()
    """Modules imported in advance, so that programs that use them start faster."""
    sandbox: Programs = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        at_least("python_executor.workers", self.workers, 1)
        sandbox = Sandbox(
            self.limits, self.workers, echo_last=True, packages=self.packages, imports=self.imports
        )
        object.__setattr__(self, "sandbox", sandbox)

    def on_hosts(self, hosts: Hosts) -> PythonExecutor:
        """Returns the same tool, whose programs run on other nodes too."""
        spread = replace(self)
        assert isinstance(spread.sandbox, Sandbox)
        object.__setattr__(spread, "sandbox", SpreadSandbox(spread.sandbox, hosts))
        return spread

    async def setup(self) -> Sequence[Tool]:
        await self.sandbox.start()
        return [PythonTool(self.sandbox)]

    async def close(self) -> None:
        await self.sandbox.close()


class Toolbox:
    """The tools of an episode, or of many at once.

    tools: `Tool`s, `ToolSource`s, and functions (see `tool_of`). tool_seconds: timeout of a call,
    which the model reads about; a call blocked in a thread continues there, and its result is
    discarded. result_characters: most of a result; of a longer one, the first and the last half.

    Raises: UserError for functions that cannot be tools, and for two tools of one name.
    """

    def __init__(
        self,
        tools: Sequence[Tool | ToolSource | Callable[..., Any]],
        tool_seconds: float = 30.0,
        result_characters: int = 16_000,
    ) -> None:
        positive("tool_seconds", tool_seconds)
        at_least("result_characters", result_characters, 16)
        self.tool_seconds = tool_seconds
        self.result_characters = result_characters
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
        """Starts the tool sources. Safe to call twice. Raises: UserError if one cannot work."""
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
        """The schemas of all tools, in the given order; those of a `ToolSource` are known after
        `setup`."""
        return tuple(tool.schema for tool in self._tools.values())

    async def call(self, name: str, arguments: str) -> Result:
        """Returns the tool's result, or a sentence about what was wrong. arguments: JSON, as the
        model wrote it. Only a tool that shows images returns parts.

        Raises only errors that end the run: UserError and EngineError of a tool.
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
        if mismatch := await schemas.arguments_mismatch(parameters_of(tool), arguments or "{}"):
            return f"The arguments of {name} do not fit: {mismatch}."
        result = await self._answer(tool, parsed)
        if isinstance(result, str):
            return self._shortened(result)
        return [
            {**part, "text": self._shortened(part["text"])} if part.get("type") == "text" else part
            for part in result
        ]

    def _shortened(self, text: str) -> str:
        return shorten(text, "", False, self.result_characters)[0]

    async def _answer(self, tool: Tool, arguments: dict[str, Any]) -> Result:
        own = getattr(tool, "limits_itself", False)
        try:
            async with asyncio.timeout(None if own else self.tool_seconds) as limit:
                with waiting(whose(), f"its tool {tool.name}"):
                    result = await tool.call(arguments)
                    return result if shows(result) else str(result)
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

    def _add(self, tool: Tool, error: str | None) -> None:
        if tool.name in self._tools:
            raise UserError(
                f"two tools are called {tool.name!r}: rename one, so that a model can distinguish"
                " them"
            )
        if error is not None:
            raise UserError(
                f"the parameters of the tool {tool.name!r} are not a JSON schema: {error}"
            )
        self._tools[tool.name] = tool


def shows(result: Any) -> bool:
    """True for parts of content among which is an image (areal_x.hf.image_reader)."""
    return isinstance(result, list) and any(map(is_image, result))


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    return tool.schema["function"].get("parameters") or {"type": "object"}
