"""Whatever a model requests of a tool, it gets a text."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import dataclass
from typing import Literal

import gin
import pytest

from areal_x.agents.tools.toolbox import PythonExecutor, Tool, Toolbox, ToolError, ToolSource, tool_of, tool_schema
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import EngineError
from areal_x.sandbox.pool import SandboxLimits


def weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
        city: Its name.
        days: How many days ahead.
    """
    return f"{city}: sun for {days} days"


async def lookup(word: str, kind: Literal["noun", "verb"] = "noun") -> dict:
    """Returns the meaning of a word.

    Args:
        word: The word.
        kind: Its kind.
    """
    return {"word": word, "kind": kind, "é": [1]}


def call(name, arguments, *tools, **settings):
    async def one():
        toolbox = Toolbox(tools, **settings)
        try:
            return await toolbox.call(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        finally:
            await toolbox.close()

    return asyncio.run(one())


def test_a_function_becomes_a_tool_with_the_schema_of_its_hints_and_docstring():
    assert tool_of(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                },
                "required": ["city"],
            },
        },
    }


def test_functions_answer_blocking_or_not():
    assert call("weather", {"city": "Oslo"}, weather) == "Oslo: sun for 1 days"
    assert call("lookup", {"word": "x"}, weather, lookup) == '{"word": "x", "kind": "noun", "é": [1]}'


def test_a_function_that_blocks_does_not_stop_the_loop():
    release = threading.Event()

    def waits() -> str:
        """Waits."""
        release.wait()
        return "done"

    async def run():
        answer = asyncio.create_task(Toolbox([waits]).call("waits", "{}"))
        await asyncio.sleep(0)
        release.set()
        return await answer

    assert asyncio.run(run()) == "done"


def test_a_configurable_of_gin_becomes_a_tool_with_what_is_bound():
    @gin.configurable(module="tests")
    def scaled(x: int, factor: int = 1) -> int:
        """Scales.

        Args:
            x: A number.
            factor: Another.
        """
        if x < 0:
            raise ToolError("Give a number from 0 on.")
        return x * factor

    try:
        with gin.unlock_config():
            gin.parse_config("tests.scaled.factor = 5")
        assert call("scaled", {"x": 2}, scaled) == "10"
        assert call("scaled", {"x": -1}, scaled) == "Give a number from 0 on."
    finally:
        gin.clear_config()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("wether", "{}", "There is no tool 'wether'; the tools are: weather, lookup; did you mean 'weather'?."),
        ("weather", "{", "The arguments of weather are not valid JSON"),
        ("weather", '{"city": NaN}', "NaN is not a JSON number"),
        ("weather", "[" * 100_000, "are not valid JSON"),
        ("weather", "[]", "do not fit: [] is not of type 'object'."),
        ("weather", '"Oslo"', "do not fit: 'Oslo' is not of type 'object'."),
        ("weather", "null", "do not fit: None is not of type 'object'."),
        ("weather", "", "do not fit: 'city' is a required property."),
        ("weather", '{"city": 5}', "do not fit: city: 5 is not of type 'string'."),
        ("weather", '{"city": "a", "days": "b"}', "do not fit: days: 'b' is not of type 'integer'."),
        ("weather", '{"city": "a", "day": 1}', "do not fit: 'day' is unknown; known are: city, days; did you mean 'days'?."),
        ("lookup", '{"word": "a", "kind": "adverb"}', "kind: 'adverb' is not one of ['noun', 'verb']"),
    ],
)
def test_a_models_mistake_is_a_sentence(name, arguments, words):
    assert words in call(name, arguments, weather, lookup)


def test_a_tool_that_fails_is_a_sentence():
    def fails(kind: str) -> str:
        """Fails.

        Args:
            kind: How.
        """
        raise {"value": ValueError("two\nlines"), "tool": ToolError("Try again."), "time": TimeoutError(), "exit": KeyError}[
            kind
        ]

    assert call("fails", {"kind": "value"}, fails) == "The tool fails failed: ValueError: two lines"
    assert call("fails", {"kind": "tool"}, fails) == "Try again."
    assert call("fails", {"kind": "time"}, fails) == "The tool fails failed: TimeoutError"
    assert call("fails", {"kind": "exit"}, fails) == "The tool fails failed: KeyError"


def test_a_tool_that_does_not_answer_is_a_sentence_and_is_cancelled():
    ended = []

    async def never() -> str:
        """Never answers."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    def blocks() -> str:
        """Never returns."""
        threading.Event().wait()
        return ""

    assert call("never", {}, never, tool_seconds=0.05) == "The tool never did not answer within 0.05 seconds."
    assert ended == [True]
    assert call("blocks", {}, blocks, tool_seconds=0.05) == "The tool blocks did not answer within 0.05 seconds."


@pytest.mark.parametrize("error", [UserError("set this"), EngineError("gone")])
def test_only_what_ends_a_run_is_raised(error):
    def ends() -> str:
        """Ends all."""
        raise error

    with pytest.raises(type(error), match=str(error)):
        call("ends", {}, ends)


def test_a_cancelled_call_is_cancelled():
    async def run():
        async def never() -> str:
            """Never."""
            await asyncio.Event().wait()
            return ""

        task = asyncio.create_task(Toolbox([never]).call("never", "{}"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_long_answer_is_cut_in_the_middle():
    def long() -> str:
        """Says much."""
        return "a" * 500 + "b" * 500

    text = call("long", {}, long, result_characters=100)
    assert text.startswith("a" * 50 + "\n[")
    assert text.endswith("]\n" + "b" * 50)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "no docstring"),
        (len, "cannot be a tool"),
    ],
)
def test_a_function_without_hints_or_docstring_is_refused(function, words):
    with pytest.raises(UserError, match=words):
        tool_of(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match="two tools are called 'weather'"):
        Toolbox([weather, weather])


@pytest.mark.parametrize("settings", [{"tool_seconds": 0}, {"result_characters": 1}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        Toolbox([], **settings)


def test_a_tool_without_a_json_schema_is_refused_wherever_it_comes_from():
    @dataclass(frozen=True)
    class Wrong:
        name: str = "wrong"
        schema = tool_schema("wrong", "", {"type": "objekt"})

        async def call(self, arguments):
            return ""

    class Listing:
        async def setup(self):
            return [Wrong()]

        async def close(self):
            pass

    with pytest.raises(UserError, match="'wrong' are not a JSON schema: 'objekt' is not valid"):
        Toolbox([Wrong()])
    with pytest.raises(UserError, match="'wrong' are not a JSON schema: 'objekt' is not valid"):
        asyncio.run(Toolbox([Listing()]).setup())


class Counting:
    """A source that counts how often it is started and closed."""

    def __init__(self, fails=False):
        self.fails, self.started, self.closed = fails, 0, 0

    async def setup(self):
        await asyncio.sleep(0)
        self.started += 1
        if self.fails:
            raise UserError("it cannot start")
        return [tool_of(weather)]

    async def close(self):
        self.closed += 1


def test_sources_are_started_once_and_closed():
    async def run():
        source = Counting()
        toolbox = Toolbox([lookup, source])
        assert isinstance(source, ToolSource)
        assert not isinstance(source, Tool)
        before = [schema["function"]["name"] for schema in toolbox.schemas]
        answers = await asyncio.gather(*(toolbox.call("weather", '{"city": "a"}') for _ in range(5)))
        after = [schema["function"]["name"] for schema in toolbox.schemas]
        await toolbox.close()
        await toolbox.setup()
        await toolbox.close()
        return before, set(answers), after, source.started, source.closed

    assert asyncio.run(run()) == (["lookup"], {"a: sun for 1 days"}, ["lookup", "weather"], 2, 2)


def test_a_source_that_cannot_start_closes_the_others():
    good, bad = Counting(), Counting(fails=True)
    with pytest.raises(UserError, match="it cannot start"):
        asyncio.run(Toolbox([good, bad]).setup())
    assert (good.closed, bad.closed) == (1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_programs_run_in_the_sandbox():
    async def run():
        toolbox = Toolbox([PythonExecutor(SandboxLimits(seconds=1), workers=1)], tool_seconds=0.1)
        await toolbox.setup()
        names = [schema["function"]["name"] for schema in toolbox.schemas]
        programs = ["x = 6\nx * 7", "x", "print('a')\n1 / 0", "while True: pass", "open('/etc/passwd')"]
        answers = [await toolbox.call("python", json.dumps({"code": program})) for program in programs]
        wrong = await toolbox.call("python", '{"source": "1"}')
        await toolbox.close()
        return names, answers, wrong

    names, answers, wrong = asyncio.run(run())
    assert names == ["python"]
    assert answers[0] == "42"
    assert answers[1].endswith("NameError: name 'x' is not defined")  # each starts anew
    assert answers[2].startswith("a\nTraceback")
    assert answers[2].endswith("ZeroDivisionError: division by zero")
    assert answers[3] == "the program was ended after 1 seconds"  # by the sandbox, not by tool_seconds
    assert "Error" in answers[4]
    assert wrong == "The arguments of python do not fit: 'code' is a required property."


def test_an_executor_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"python_executor\.workers"):
        PythonExecutor(workers=0)
