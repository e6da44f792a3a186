"""A program is judged by what it prints and returns, and by nothing that it does in its process."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.errors import ConfigError
from areal_x.rewards.code import judge as judging
from areal_x.rewards.code.judge import PROGRAM
from areal_x.rewards.code.reward import code_tests
from areal_x.rewards.pool import RewardPool
from areal_x.sandbox.pool import ProgramResult
from areal_x.tasks.code.program_tests import PrintedTest
from areal_x.types import Outcome, Scored, Task
from tests.thorough import further

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SECRET = 915_577  # a result that no program contains
PRINTED = [{"input": "400000 515577\n", "output": f"{SECRET}\n"}, {"input": "1 2\n", "output": "3\n"}]
CALLED = [{"call": "add", "arguments": [400_000, 515_577], "returns": SECRET}]
ASSERTED = [{"assert": f"assert add(400000, 515577) == {SECRET}"}]
ADD = "def add(a, b):\n    return a + b\n"
RIGHT = {"printed": "print(sum(map(int, input().split())))", "called": ADD, "asserted": ADD}
TESTS = {"printed": PRINTED, "called": CALLED, "asserted": ASSERTED}


def score(text: str, tests: list[dict[str, Any]], setup: str = "", **settings: Any) -> tuple[float, dict[str, float]]:
    return code_tests(Task("task", "prompt", {"tests": tests, "setup": setup}), text, **settings)


def failure(text: str, tests: list[dict[str, Any]], **settings: Any) -> str | None:
    """The reason that the details give for a reward of 0."""
    reward, details = score(text, tests, **settings)
    reasons = [name for name in ("no_program", "wrong", "crashed", "exceeded") if details[name]]
    assert (reward == 1.0) == (reasons == [])
    return reasons[0] if reasons else None


@pytest.mark.parametrize("form", TESTS)
def test_a_right_program_passes(form: str) -> None:
    assert score(f"Here:\n```python\n{RIGHT[form]}\n```\nDone.", TESTS[form])[0] == 1.0


# ---- attacks

EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return {}
"""
FORGED = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, {!r})\n    except OSError: pass\n"
READ = """
import gc, glob, os, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from (repr(frame.f_locals), repr(frame.f_globals))
        frame = frame.f_back
    yield from map(repr, gc.get_objects())
    places = ("/proc/*/*", "/proc/*/fd/*", "/tmp/*", "/home/*/*", "/dev/*")
    for name in (name for place in places for name in glob.glob(place)):
        if "random" in name or "zero" in name or "full" in name:
            continue
        try:
            with open(name, errors="replace") as file:
                yield file.read(1 << 20)
        except OSError:
            pass
    yield from os.environ.values()
def found():
    wanted = "775519"  # backwards, so that it does not find itself
    return int(wanted[::-1]) if any(wanted in text[::-1] for text in texts()) else 0
def add(a, b):
    return found()
"""
ATTACKS = {
    "it exits with success before the tests": "import sys\nsys.exit(0)",
    "it exits at once": "import os\nos._exit(0)",
    "it raises SystemExit inside the call": "def add(a, b):\n    raise SystemExit(0)",
    "its value equals everything": EQUAL.format("Equal(7)"),
    "its value equals everything and is of no plain type": EQUAL.replace("(int)", "").format("Equal()"),
    "it replaces print and the standard output": (
        "import builtins, io, sys\nbuiltins.print = lambda *a, **k: None\nsys.stdout = io.StringIO()\n"
        "def add(a, b): return 0\nprint('passed')"
    ),
    "it replaces what encodes its values": (
        "import sys, json\njson.dumps = lambda *a, **k: 'true'\n"
        "frame = sys._getframe()\nwhile frame:\n    frame.f_globals.update(encoded=lambda v: True)\n    frame = frame.f_back\n"
        "def add(a, b): return 0"
    ),
    "it replaces the built-in comparisons": (
        "import builtins\nbuiltins.all = builtins.any = lambda *a: True\n"
        "builtins.AssertionError = Warning\ndef add(a, b): return 0"
    ),
    "it writes a pass to every descriptor": FORGED.format(b'[true]["held"]passed') + "def add(a, b): return 0",
    "it replies by itself and exits": FORGED.format(b'"held"') + "os._exit(0)",
    "it replies with something that is no value": FORGED.format(b'[{"iterator": 1}]') + "os._exit(0)",
    "it replies with deeply nested lists": FORGED.format(b"[" * 50_000) + "os._exit(0)",
    "it reads everything that it can": READ,
    "it leaves a process behind that would answer for the next": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\ndef add(a, b): return 0"
    ),
}


@pytest.mark.parametrize("form", ["called", *further("printed", "asserted")])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_passes_without_the_result(attack: str, form: str) -> None:
    program = ATTACKS[attack]
    if form == "printed" and "def found" in program:
        program += "\nprint(found())"
    assert failure(program, TESTS[form], seconds=10) in (("wrong",) if "wanted" in program else ("wrong", "crashed"))


def test_the_attack_that_reads_would_find_the_result_if_it_were_there() -> None:
    assert failure(READ + f"hidden = ['{SECRET}']", CALLED, seconds=10) is None


def test_the_process_of_a_program_is_given_no_expected_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request whose program is the model's, searched for the secret."""
    from areal_x.rewards.code import reward as module

    seen: list[str] = []
    original = module._runner

    def recording(limits: Any) -> Any:
        run = original(limits)

        def kept(code: str, stdin: str, seconds: float) -> Any:
            seen.append(code.removeprefix(PROGRAM) + stdin)
            return run(code, stdin, seconds)

        return kept

    monkeypatch.setattr(module, "_runner", recording)
    for form, tests in TESTS.items():
        assert failure(RIGHT[form], tests) is None
    models = [request for request in seen if "run_check" not in request]
    assert len(models) == 4
    assert not any(str(SECRET) in request for request in models)
    assert [request for request in seen if "run_check" in request and "def add" in request] == []


LIMITS = {
    "an endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "endless output": "while True: print('x' * 10000)",
    "more output than allowed": "print('x' * 3_000_000)",
    "memory": "x = bytearray(3 * 10**9)",
    "an endless value": "import itertools\ndef add(a, b): return itertools.count()\nadd(1, 2)\nlist(add(1, 2))",
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_that_is_exceeded_is_a_failed_test(what: str) -> None:
    assert failure(LIMITS[what], PRINTED, seconds=0.25, memory_mb=200) == "exceeded"


def test_a_fork_bomb_costs_its_own_test_and_not_the_reward_process() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"

    async def outcomes() -> list[Outcome]:
        pool = RewardPool(partial(code_tests, seconds=1), workers=1, timeout_seconds=60)
        try:
            task = Task("task", "prompt", {"tests": PRINTED})
            return [await pool.score(task, text) for text in (bomb, RIGHT["printed"])]
        finally:
            await pool.close()

    bombed, right = asyncio.run(outcomes())
    assert isinstance(bombed, Scored)
    assert isinstance(right, Scored)
    assert (bombed.reward, right.reward) == (0.0, 1.0)


# ---- what counts


def test_output_is_compared_word_by_word() -> None:
    tests = [{"input": "", "output": "Grüße 1.0\r\nb\u00a0c \r\n\r\n"}]
    assert failure("print('Grüße  1')\nprint('b\\u00a0c')", tests) is None
    assert failure("print('Grüsse 1')\nprint('b c')", tests) == "wrong"
    assert failure("print('Grüße 1.000001')\nprint('b c')", tests) == "wrong"
    assert failure("print('Grüße 1.000001')\nprint('b c')", tests, float_tolerance=1e-5) is None
    assert failure("print('Grüße 1')\nprint('b c')\nprint('d')", tests) == "wrong"


def test_a_program_runs_as_a_script() -> None:
    program = (
        "import sys, threading\nfrom dataclasses import dataclass\n@dataclass\nclass Sum:\n    value: 'int'\n"
        "def main():\n    print('debugging', file=sys.stderr)\n    print(Sum(sum(map(int, open(0).read().split()))).value)\n"
        "if __name__ == '__main__':\n    thread = threading.Thread(target=main)\n    thread.start()\n"
        "    thread.join()\n    exit()\n"
    )
    assert failure(program, PRINTED) is None


def test_an_error_after_the_right_output_fails() -> None:
    assert failure(RIGHT["printed"] + "\nraise ValueError", PRINTED) == "crashed"
    assert failure(RIGHT["printed"] + "\nexit(3)", PRINTED) == "crashed"


def test_partial_credit_is_off_unless_it_is_asked_for() -> None:
    tests = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}, {"input": "3 1", "output": "4"}]
    wrong_once = "a, b = map(int, input().split())\nprint(a + b if a != 2 else 0)"
    reward, details = score(wrong_once, tests)
    assert (reward, details["tests_passed"]) == (0.0, 1 / 3)  # it stops at the first
    reward, details = score(wrong_once, tests, partial=True)
    assert (reward, details["tests_passed"], details["wrong"]) == (2 / 3, 2 / 3, 1.0)
    assert score(wrong_once, tests, max_tests=1)[0] == 1.0


def test_tests_that_are_left_when_the_time_is_over_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(judging, "time", SimpleNamespace(monotonic=lambda: now))
    allowed: list[float] = []

    def run(code: str, stdin: str, seconds: float) -> ProgramResult | None:
        nonlocal now
        now += 0.4
        allowed.append(round(seconds, 1))
        return ProgramResult(stdin, None, False, 0.4, "ok") if seconds >= 0.4 else None

    tests = [PrintedTest(str(n), str(n)) for n in range(50)]
    verdict = judging.Judge(run, test_seconds=0.5, total_seconds=1).judge("", tests, stop=False)
    assert allowed == [0.5, 0.5, 0.2]
    assert verdict == judging.Verdict(2, 50, "exceeded")


def test_a_function_is_called_with_json_values() -> None:
    tests = [{"call": "pairs", "arguments": [{"a": [1]}, "ß"], "returns": [["a", [1]], "ß"]}]
    method = (
        "class Solution:\n    def pairs(self, x: Dict[str, List[int]], y):\n"
        "        print('noise')\n        return (*x.items(), y)"
    )
    assert failure(method, tests) is None
    assert failure("def pairs(x, y): return [*x.items(), y + 's']", tests) == "wrong"
    assert failure("def other(x, y): return 0", tests) == "crashed"
    floats = [{"call": "third", "arguments": [], "returns": 0.3333}]
    assert failure("def third(): return 1 / 3", floats) == "wrong"
    assert failure("def third(): return 1 / 3", floats, float_tolerance=1e-3) is None


ASSERTIONS = [
    ("def f(x): return {x, 2}", "assert f(1) == {1, 2}", ""),
    ("def f(x): return (complex(x), b'b')", "assert f(1) == (1 + 0j, b'b')", ""),
    ("def f(x): return 3 ** 10_000 * x", "assert f(2) % 7 == 3 ** 10_000 * 2 % 7", ""),
    ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']", ""),
    ("def f(x): return x / 3", "assert math.isclose(f(1), 1 / 3)", "import math"),
    ("def f(x): return x", "assert not f('')", ""),
    ("class Node:\n    def __init__(self, v): self.v = v\ndef f(n): return n.v", "assert f(root) == 'ü'", "root = Node('ü')"),
    ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aa') == {'a': 2}", ""),
    ("def f(x): return x[0]", "assert f([1]) == f((1,))\r\nassert f('a') == 'a'", ""),
]


@pytest.mark.parametrize(("program", "test", "setup"), ASSERTIONS, ids=[test for _, test, _ in ASSERTIONS])
def test_an_assertion_holds_for_the_values_of_the_program(program: str, test: str, setup: str) -> None:
    assert score(program, [{"assert": test}], setup)[0] == 1.0
    assert (
        score(
            "def f(x): return None\nclass Node:\n    def __init__(self, v): pass", [{"assert": test.replace("not ", "")}], setup
        )[0]
        == 0.0
    )


def test_details_have_the_same_names_whatever_happened() -> None:
    names = {tuple(score(text, PRINTED)[1]) for text in ("", "1/0", RIGHT["printed"])}
    assert names == {("tests_passed", "no_program", "wrong", "crashed", "exceeded")}
    assert failure("```cpp\nint main() {}\n```", PRINTED) == "no_program"


def test_limits_that_cannot_work_are_refused() -> None:
    wrong = {"max_tests": 0, "seconds": 0, "total_seconds": 0, "float_tolerance": -1, "memory_mb": 1, "processes": 0}
    for name, value in {**wrong, "output_characters": 0}.items():
        with pytest.raises(ConfigError, match=rf"code_tests\.{name}"):
            score("1", PRINTED, **{name: value})


def test_a_task_without_tests_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tests"):
        score("1", [])
    assert json.dumps(PRINTED)  # tasks are plain data
