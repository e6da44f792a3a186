"""Programming tasks of records in the forms of LiveCodeBench, APPS and MBPP, and in this project's
own: functions for `load_dataset.to_task`.

Their tests stay out of the prompt, except the examples that the benchmarks show. Each record is
checked when it is loaded (areal_x.tasks.code.program_tests.read_tests).
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gin

from areal_x.errors import at_least
from areal_x.tasks.code.pickled_text import read_compressed_text
from areal_x.tasks.code.program_tests import read_tests
from areal_x.types import Message, Task

Record = Mapping[str, Any]

# the wording of LiveCodeBench (lcb_runner/prompts/code_generation.py, generic)
QUESTION = (
    "You will be given a question (problem specification) and will generate a correct Python program"
    " that matches the specification and passes all tests.\n\n### Question:\n{question}\n\n"
)
WITH_STARTER = (
    "### Format: You will use the following starter code to write the solution to the problem and"
    " enclose your code within delimiters.\n```python\n{starter}\n```\n\n"
)
FROM_STDIN = (
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not"
    " directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure"
    " that when the python program runs, it reads the inputs, runs the algorithm and writes output"
    " to STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n"
)
CALLED = (
    "### Format: Write the Python function {function}, and enclose your code within delimiters.\n"
    "```python\n# YOUR CODE HERE\n```\n\n"
)
ANSWER = "### Answer: (use the provided format with backticks)\n\n"
# after Austin et al., arXiv 2108.07732
MBPP = "{text}\nYour code should pass these tests:\n\n{tests}\n\nEnclose your code in ```python and ```."
FIELDS = ("tests", "setup", "functions")


@gin.configurable
def code_task(record: Record, id: str) -> Task:
    """Makes a task of a record with a `prompt` (text or chat messages) and `tests`, and optionally
    `setup` and `functions`; other fields become metadata.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: ValueError for tests that cannot be used.
    """
    rest = {name: value for name, value in record.items() if name not in ("prompt", *FIELDS)}
    answer = {name: record[name] for name in FIELDS if record.get(name)}
    return _task(id, record["prompt"], {"tests": record["tests"], **answer}, rest)


@gin.configurable
def livecodebench_task(record: Record, id: str) -> Task:
    """Makes a task of a record of LiveCodeBench (code_generation_lite): public and private tests of
    standard input or of a method, and the benchmark's own prompt.

    Private tests may be JSON, or base64(zlib(pickle(JSON))), whose pickle is read without executing
    it.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: ValueError for tests that cannot be used.
    """
    about = _json(record.get("metadata") or "{}", "metadata")
    function = about.get("func_name") if isinstance(about, Mapping) else None
    cases = [
        *_json(record["public_test_cases"], "public_test_cases"),
        *_private(record.get("private_test_cases") or "[]"),
    ]
    tests = [_livecodebench_test(case, function) for case in cases]
    kept = ("question_id", "question_title", "platform", "difficulty", "contest_date")
    prompt = _question(record["question_content"], record.get("starter_code"), function)
    return _task(id, prompt, {"tests": tests}, {name: record.get(name) for name in kept})


@gin.configurable
def apps_task(record: Record, id: str) -> Task:
    """Makes a task of a record of APPS, or of TACO: `question`, `starter_code`, and `input_output`, a
    JSON text with `inputs`, `outputs` and, for a function, `fn_name`.

    As in the benchmark, the value of a function may also be the only element of the expected list.

    Args:
        record: One of the dataset's.
        id: The task's.

    Raises: ValueError for tests that cannot be used, and for a record without any.
    """
    pairs = _json(record.get("input_output") or "{}", "input_output")
    inputs, outputs = pairs.get("inputs") or [], pairs.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"input_output has {len(inputs)} inputs and {len(outputs)} outputs")
    function = pairs.get("fn_name")
    tests: list[dict[str, Any]] = []
    for given, expected in zip(inputs, outputs, strict=True):
        if not function:
            tests.append({"input": _lines(given), "output": _lines(expected)})
            continue
        arguments = _json_lines(given) if isinstance(given, str) else list(given)
        wrapped = isinstance(expected, list) and len(expected) == 1
        test = {"call": function, "arguments": arguments, "returns": expected}
        tests.append({**test, "or_returns": expected[0]} if wrapped else test)
    kept = {name: record[name] for name in ("problem_id", "id", "difficulty") if name in record}
    prompt = _question(record["question"], record.get("starter_code"), function)
    return _task(id, prompt, {"tests": tests}, kept)


@gin.configurable
def mbpp_task(record: Record, id: str, shown: int = 1) -> Task:
    """Makes a task of a record of MBPP, in its full or its sanitized form: `text` or `prompt`,
    `test_list`, `challenge_test_list`, and `test_setup_code` or `test_imports`.

    Args:
        record: One of the dataset's.
        id: The task's.
        shown: Tests in the prompt, which tell the function's name. The paper shows all three, with the
            values that they expect.

    Raises: ValueError for tests that cannot be used.
    """
    at_least("mbpp_task.shown", shown, 0)
    listed = [str(test).strip() for test in record["test_list"]]
    tests = [*listed, *(str(test).strip() for test in record.get("challenge_test_list") or ())]
    setup = "\n".join([*(record.get("test_imports") or ()), record.get("test_setup_code") or ""])
    text = record["text"] if "text" in record else record["prompt"]
    answer = {
        "tests": [{"assert": test} for test in tests],
        "setup": setup.strip().replace("\r\n", "\n"),
        "functions": _like_builtins(str(record.get("code") or "")),
    }
    prompt = MBPP.format(text=text, tests="\n".join(listed[:shown]))
    return _task(id, prompt, answer, {"task_id": record.get("task_id")})


def _task(
    id: str, prompt: str | Sequence[Message], answer: Record, metadata: Mapping[str, Any]
) -> Task:
    """Returns the task, after reading its tests."""
    read_tests(answer)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Task(id, messages, answer, metadata)


def _question(question: str, starter: str | None, function: str | None) -> str:
    if starter and starter.strip():
        form = WITH_STARTER.format(starter=starter)
    else:
        form = CALLED.format(function=function) if function else FROM_STDIN
    return f"{QUESTION.format(question=question)}{form}{ANSWER}"


def _livecodebench_test(case: Record, function: str | None) -> dict[str, Any]:
    if case.get("testtype") != "functional":
        return {"input": case["input"], "output": case["output"]}
    if not function:
        raise ValueError("functional tests need the name of a function: metadata has no func_name")
    return {
        "call": function,
        "arguments": _json_lines(case["input"]),
        "returns": _json(case["output"], "the output of a test"),
    }


def _private(value: Any) -> Iterable[Any]:
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
        return list(_json(value, "private_test_cases"))
    try:
        return list(_json(read_compressed_text(value), "private_test_cases"))
    except ValueError as error:
        raise ValueError(f"private_test_cases: {error}") from None


def _json(value: Any, what: str) -> Any:
    """Returns the value of a JSON text, or a value that a file had already unpacked."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error})") from None


def _json_lines(text: str) -> list[Any]:
    """The arguments of a call, one JSON value a line."""
    return [_json(line, "an argument") for line in text.split("\n") if line.strip()]


def _lines(value: Any) -> str:
    """A text, or APPS's list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _like_builtins(code: str) -> list[str]:
    """The functions of a reference solution that have the name of a built-in."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        names = {
            node.name
            for node in ast.parse(code.replace("\r\n", "\n")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        return sorted(names & set(dir(builtins)))
    return []
