"""Runs a program against the tests of its task.

The program runs in the sandbox and gets a test's input or arguments. What it prints or returns is
compared here, or for an assertion in another program of the sandbox: so its process has nothing to
read that would help it, and nothing to change that decides.
"""

from __future__ import annotations

import json
import marshal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_x.rewards.code import inside
from areal_x.rewards.code.comparison import same_output, same_value
from areal_x.sandbox.pool import ProgramResult
from areal_x.tasks.code.assertions import Assertion
from areal_x.tasks.code.program_tests import AssertTest, CallTest, PrintedTest, Test

Failure = Literal["wrong", "crashed", "exceeded"]
# runs a program with a standard input for at most so many seconds; None if it took longer
Run = Callable[[str, str, float], ProgramResult | None]


def _compiled_inside() -> str:
    """A program that has the functions of areal_x.rewards.code.inside: compiled here, because that
    takes 5 ms, a third of the time of a small program."""
    source = Path(str(inside.__file__)).read_text(encoding="utf-8")
    return f"import marshal\nexec(marshal.loads({marshal.dumps(compile(source, 'inside.py', 'exec'))!r}))"


PROGRAM = _compiled_inside()


@dataclass(frozen=True)
class Verdict:
    """passed: tests that the program passed. tests: all that there are, or that were to be run.
    failure: the first: "wrong" (another output or value), "crashed" (an error, or no value),
    "exceeded" (a limit of time, memory, output or processes)."""

    passed: int
    tests: int
    failure: Failure | None

    @property
    def share(self) -> float:
        return self.passed / self.tests


@dataclass(frozen=True)
class Judge:
    """run: runs a program in the sandbox. test_seconds: of each test; total_seconds: of all.
    tolerance: of floats."""

    run: Run
    test_seconds: float
    total_seconds: float
    tolerance: float = 0.0

    def judge(self, source: str, tests: Sequence[Test], stop: bool = True) -> Verdict:
        """Runs the tests in order. stop: at the first that fails. Tests that are left when the time
        is over have failed."""
        end = time.monotonic() + self.total_seconds
        passed, first = 0, None
        for test in tests:
            failure = self._failure(source, test, end)
            passed += failure is None
            first = first or failure
            if failure is not None and (stop or time.monotonic() >= end):
                break
        return Verdict(passed, len(tests), first)

    def _failure(self, source: str, test: Test, end: float) -> Failure | None:
        match test:
            case PrintedTest(given, expected):
                output = self._output("run_script", [source], end, given)
                return _unless(output, lambda text: same_output(text, expected, self.tolerance))
            case CallTest(function, arguments, accepted):
                output = self._output("run_function", [source, function, arguments], end)
                return _unless(
                    output,
                    lambda text: any(
                        same_value(_value(text), value, self.tolerance) for value in accepted
                    ),
                )
            case AssertTest(assertions, setup):
                failures = (self._assertion(source, one, setup, end) for one in assertions)
                return next((failure for failure in failures if failure), None)

    def _assertion(
        self, source: str, assertion: Assertion, setup: str, end: float
    ) -> Failure | None:
        output = self._output("run_calls", [source, setup, assertion.calls], end)
        if isinstance(output, _Failed):
            return output.failure
        try:
            values = json.loads(output)
        except (ValueError, RecursionError):
            return "crashed"
        if not isinstance(values, list) or len(values) != len(assertion.calls):
            return "crashed"
        held = self._output("run_check", [values, setup, assertion.check], end)
        return None if held == '"held"' else "wrong"

    def _output(
        self, function: str, arguments: Sequence[Any], end: float, stdin: str = ""
    ) -> str | _Failed:
        """Returns what a function of areal_x.rewards.code.inside wrote."""
        request = json.dumps(arguments)
        code = f"{PROGRAM}\n\n{function}(*json.loads({request!a}))\n"
        seconds = min(self.test_seconds, end - time.monotonic())
        result = self.run(code, stdin, seconds) if seconds > 0 else None
        if result is None or result.status in ("timeout", "memory", "killed") or result.truncated:
            return _Failed("exceeded")
        return result.output if result.status == "ok" else _Failed("crashed")


@dataclass(frozen=True)
class _Failed:
    failure: Failure


def _unless(output: str | _Failed, passes: Callable[[str], bool]) -> Failure | None:
    """Returns why a test fails, if it does."""
    if isinstance(output, _Failed):
        return output.failure
    try:
        return None if passes(output) else "wrong"
    except Exception:  # the program wrote something that is no value
        return "crashed"


def _value(text: str) -> Any:
    (value,) = json.loads(text)
    return inside.decoded(value)
