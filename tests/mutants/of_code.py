"""Bugs by which programs pass without the right result, or files of tests run something."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

REWARD = ("tests/rewards/test_code_tests.py",)
RECORDS = ("tests/tasks/test_code_records.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/rewards/code/judge.py",
        REWARD,
        (
            "an assertion's calls are sent with the whole assertion",
            '"run_calls", [source, setup, assertion.calls], end',
            '"run_calls", [source, setup + "\\n#" + assertion.check, assertion.calls], end',
        ),
        (
            "a program that ends with an error is judged by its output",
            'return result.output if result.status == "ok" else _Failed("crashed")',
            "return result.output",
        ),
        (
            "tests that are left when the time is over have passed",
            "return Verdict(passed, len(tests), first)",
            "return Verdict(passed, passed + 1 if first else passed, first)",
        ),
    ),
    *planted(
        "areal_x/rewards/code/inside.py",
        REWARD,
        (
            "printed text is mixed with the values",
            "reply = os.dup(1)\n    _silence(1)",
            "reply = os.dup(1)",
        ),
    ),
    *planted(
        "areal_x/rewards/code/comparison.py",
        REWARD,
        (
            "numbers that are nearly equal count as equal",
            "return Decimal(one) == Decimal(other)",
            "return math.isclose(float(one), float(other), rel_tol=1e-5)",
        ),
    ),
    *planted(
        "areal_x/tasks/code/pickled_text.py",
        RECORDS,
        (
            "a pickle of any value is read for its first text",
            "elif opcode.name not in AROUND:",
            'elif opcode.name in ("REDUCE",):',
        ),
    ),
    *planted(
        "areal_x/tasks/code/assertions.py",
        RECORDS,
        (
            "a method of the program's value is called beside the program, with its arguments",
            "return name[:1].isupper() and self._is_programs(made)",
            "return self._is_programs(made)",
        ),
    ),
]
