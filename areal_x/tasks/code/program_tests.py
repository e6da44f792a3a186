"""The tests of a programming task: what `Task.answer` holds, and the checks when it is loaded.

    {"tests": [
        {"input": "1 2\\n", "output": "3\\n"},                    # standard input and output
        {"call": "add", "arguments": [1, 2], "returns": 3},       # a function, or a method of Solution
        {"assert": "assert add(1, 2) == 3"}],                     # statements as in MBPP
     "setup": "import math",            # optional: for assertions
     "functions": ["sum"]}              # optional: the program's functions that are named like built-ins

Expected values never reach the process that runs the program, so an assertion is split into the
calls of the program's functions and the rest (areal_x.tasks.code.assertions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_x.errors import in_brief
from areal_x.tasks.code.assertions import Assertion, defined_names, split_assertion


@dataclass(frozen=True)
class PrintedTest:
    """The program reads `input` from standard input and prints `output`."""

    input: str
    output: str


@dataclass(frozen=True)
class CallTest:
    """`function`, at the top of the program or a method of its class Solution, returns one of
    `accepted`."""

    function: str
    arguments: tuple[Any, ...]
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class AssertTest:
    """All of these assertions hold, with `setup` executed before."""

    assertions: tuple[Assertion, ...]
    setup: str


Test = PrintedTest | CallTest | AssertTest

FORMS = {
    frozenset({"input", "output"}): "standard input and output",
    frozenset({"call", "arguments", "returns"}): "a call",
    frozenset({"call", "arguments", "returns", "or_returns"}): "a call with two accepted values",
    frozenset({"assert"}): "an assertion",
}


@dataclass(frozen=True)
class _Common:
    """What the assertions of a task share."""

    setup: str = ""
    functions: frozenset[str] = field(default_factory=frozenset)


def read_tests(answer: Any) -> tuple[Test, ...]:
    """Returns the tests of a task's answer.

    Raises: ValueError for an answer without tests, for a test of another form, and for tests that a
    program which prints nothing would pass.
    """
    if not isinstance(answer, Mapping) or not isinstance(answer.get("tests"), Sequence):
        raise ValueError(f'the answer must be {{"tests": [...]}}, not {in_brief(answer)}')
    common = _Common(str(answer.get("setup") or ""), frozenset(answer.get("functions") or ()))
    tests = tuple(_read(test, number, common) for number, test in enumerate(answer["tests"]))
    if not tests:
        raise ValueError("there are no tests, so no program could be judged: leave the task out")
    if all(isinstance(test, PrintedTest) and not test.output.strip() for test in tests):
        raise ValueError("all tests expect no output, so a program that does nothing would pass")
    return tests


def _read(test: Any, number: int, common: _Common) -> Test:
    if not isinstance(test, Mapping) or frozenset(test) not in FORMS:
        forms = " or ".join(
            f"{{{', '.join(map(repr, sorted(form)))}}} ({what})" for form, what in FORMS.items()
        )
        raise ValueError(f"test {number} must be {forms}, not {in_brief(test)}")
    if "assert" in test:
        try:
            assertions = split_assertion(
                str(test["assert"]), defined_names(common.setup), common.functions
            )
        except ValueError as error:
            raise ValueError(f"test {number} cannot be used: {error}") from None
        return AssertTest(assertions, common.setup)
    if "call" in test:
        if not isinstance(test["call"], str) or not test["call"].isidentifier():
            raise ValueError(
                f"test {number} calls {in_brief(test['call'])}, which is not a function's name"
            )
        accepted = tuple(test[name] for name in ("returns", "or_returns") if name in test)
        return CallTest(test["call"], tuple(test["arguments"]), accepted)
    texts = {name: test[name] for name in ("input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"the {name} of test {number} must be a text, not {in_brief(text)}")
    return PrintedTest(**{name: text.replace("\r\n", "\n") for name, text in texts.items()})
