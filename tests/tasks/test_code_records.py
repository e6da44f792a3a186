"""Records of LiveCodeBench, APPS and MBPP become tasks, and what they hold is never executed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from areal_x.errors import UserError
from areal_x.tasks.code import pickled_text
from areal_x.tasks.code.assertions import split_assertion
from areal_x.tasks.code.pickled_text import read_compressed_text, read_pickled_text
from areal_x.tasks.code.program_tests import AssertTest, CallTest, PrintedTest, read_tests
from areal_x.tasks.code.records import apps_task, code_task, livecodebench_task, mbpp_task
from areal_x.tasks.datasets import ToTask, load_dataset
from areal_x.types import Task

HIDDEN = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]
PUBLIC = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]


def packed(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol=protocol))).decode()


def livecodebench(**changes: Any) -> dict[str, Any]:
    return {
        "question_title": "Sum",
        "question_content": "Add two numbers – größer als 0.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_date": "2023-05-13T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(PUBLIC),
        "private_test_cases": packed(json.dumps(HIDDEN)),
        "metadata": "{}",
        **changes,
    }


APPS = {
    "problem_id": 7,
    "question": "Add.",
    "starter_code": "",
    "input_output": json.dumps({"inputs": ["1 2\r\n", ["3", "4"]], "outputs": ["3\r\n", ["7"]]}),
    "difficulty": "introductory",
}
MBPP = {
    "task_id": 126,
    "text": "Write a python function to find the sum of common divisors.",
    "code": "def sum(a,b):\r\n    return 6",
    "test_list": ["assert sum(10,15) == 6", "assert sum(100,150) == 93"],
    "test_setup_code": "",
    "challenge_test_list": ["assert sum(4, 6) == 3"],
}


def loaded(record: dict[str, Any], to_task: ToTask, folder: Path, suffix: str = ".jsonl") -> Task:
    file = folder / f"train{suffix}"
    if suffix == ".jsonl":
        file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    else:
        table = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(table.Table.from_pylist([record]), file)
    (task,) = load_dataset(str(file), to_task=to_task)
    return task


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_same_tasks_come_from_both_kinds_of_file(suffix: str, tmp_path: Path) -> None:
    task = loaded(livecodebench(), livecodebench_task, tmp_path, suffix)
    assert read_tests(task.answer) == (PrintedTest("1 2\n", "3\n"), PrintedTest("5 6\n", "11\n"))
    assert "größer als 0" in task.prompt[0]["content"]
    assert "5 6" not in json.dumps(task.prompt)
    assert task.metadata["question_id"] == "abc301_a"
    task = loaded(APPS, apps_task, tmp_path, suffix)
    assert read_tests(task.answer) == (PrintedTest("1 2\n", "3\n"), PrintedTest("3\n4", "7"))
    task = loaded(MBPP, mbpp_task, tmp_path, suffix)
    assert [test.assertions[0].calls for test in read_tests(task.answer)] == [
        ("sum(10, 15)",),
        ("sum(100, 150)",),
        ("sum(4, 6)",),
    ]  # type: ignore[union-attr]
    assert "sum(10,15) == 6" in task.prompt[0]["content"]
    assert "93" not in task.prompt[0]["content"]


@pytest.mark.parametrize("private", [json.dumps(HIDDEN), HIDDEN, *(packed(json.dumps(HIDDEN), n) for n in range(6))], ids=str)
def test_private_tests_may_be_text_or_a_pickled_text_of_any_protocol(private: Any) -> None:
    task = livecodebench_task(livecodebench(private_test_cases=private), "train/0")
    assert read_tests(task.answer)[1] == PrintedTest("5 6\n", "11\n")


def test_functional_tests_call_a_method() -> None:
    case = {"input": '[1, 2]\n"x"\n', "output": "true", "testtype": "functional"}
    starter = "class Solution:\n    def f(self, a: List[int], b: str) -> bool:\n        "
    record = livecodebench(
        public_test_cases=json.dumps([case]),
        private_test_cases="[]",
        metadata=json.dumps({"func_name": "f"}),
        starter_code=starter,
    )
    task = livecodebench_task(record, "train/0")
    assert read_tests(task.answer) == (CallTest("f", ([1, 2], "x"), (True,)),)
    assert starter in task.prompt[0]["content"]
    with pytest.raises(ValueError, match="func_name"):
        livecodebench_task({**record, "metadata": "{}"}, "train/0")


def test_a_function_of_apps_may_return_the_only_element_of_what_is_expected() -> None:
    pairs = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[[1]], "x"]}
    tests = read_tests(apps_task({**APPS, "input_output": json.dumps(pairs)}, "train/0").answer)
    assert tests == (CallTest("f", (1, "a"), ([[1]], [1])), CallTest("f", (2, "b"), ("x",)))


def test_the_sanitized_form_of_mbpp() -> None:
    record = {"prompt": "Write.", "code": "", "test_imports": ["import math"], "test_list": ["assert math.isclose(f(1), 2)"]}
    (test,) = read_tests(mbpp_task(record, "train/0", shown=0).answer)
    assert isinstance(test, AssertTest)
    assert (test.setup, test.assertions[0].calls) == ("import math", ("f(1)",))
    assert "isclose" not in mbpp_task(record, "train/0", shown=0).prompt[0]["content"]


def test_a_file_of_ones_own() -> None:
    messages = [{"role": "user", "content": "Add."}]
    task = code_task({"prompt": messages, "tests": [{"input": "1\n", "output": "1\n"}], "source": "mine"}, "train/0")
    assert (task.prompt, task.metadata) == (messages, {"source": "mine"})


# ---- what cannot be used


def own(*tests: Any) -> dict[str, Any]:
    return {"prompt": "p", "tests": list(tests)}


UNUSABLE = {
    "no tests": (apps_task, {**APPS, "input_output": ""}, "no tests"),
    "no tests in MBPP": (mbpp_task, {**MBPP, "test_list": [], "challenge_test_list": []}, "no tests"),
    "no tests of one's own": (code_task, own(), "no tests"),
    "outputs are empty": (code_task, own({"input": "1", "output": " \n"}), "does nothing would pass"),
    "an unknown form": (code_task, own({"stdin": "1"}), "standard input and output"),
    "no text": (code_task, own({"input": 1, "output": "1"}), "input of test 0 must be a text"),
    "no function": (code_task, own({"call": "f(1)", "arguments": [], "returns": 1}), "not a function's name"),
    "lengths differ": (apps_task, {**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
    "not JSON": (apps_task, {**APPS, "input_output": "{"}, "input_output is not JSON"),
    "a pickled list": (livecodebench_task, livecodebench(private_test_cases=packed(HIDDEN)), "EMPTY_LIST"),
    "not base64": (livecodebench_task, livecodebench(private_test_cases="?"), "neither JSON nor base64"),
    "not zlib": (livecodebench_task, livecodebench(private_test_cases="AAAA"), "not zlib"),
    "no assertion": (code_task, own({"assert": "f(1)"}), "not an assert statement"),
    "no call": (code_task, own({"assert": "assert 1 == 1"}), "calls no function of the program"),
    "in a comprehension": (code_task, own({"assert": "assert all(f(x) == y for x, y in [(1, 2)])"}), "comprehension"),
    "an unknown name": (code_task, own({"assert": "assert f(1) == wanted"}), "'wanted' is neither"),
    "no Python": (code_task, own({"assert": "assert f(1 =="}), "not Python"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_tests_that_cannot_be_used_are_refused_at_load_with_their_place(case: str, tmp_path: Path) -> None:
    to_task, record, reason = UNUSABLE[case]
    with pytest.raises(UserError, match=rf"train\.jsonl:1.*{reason}"):
        loaded(record, to_task, tmp_path)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)

    def __init__(self, folder: Path) -> None:
        self.folder = folder


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_is_not_executed(tmp_path: Path, protocol: int, wrapped: bool) -> None:
    folder = tmp_path / "made"
    harmful = packed(("[]", Harmful(folder)) if wrapped else Harmful(folder), protocol)
    with pytest.raises(ValueError, match=r"the pickle has the opcode .*write the tests as JSON"):
        read_compressed_text(harmful)
    assert not folder.exists()
    pickle.loads(zlib.decompress(base64.b64decode(harmful)))
    assert folder.exists()  # it would have been


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\x04.", b"\x80\x04\x95", b"X\xff\xff\xff\x7f", b"\xff", pickle.dumps("a")[:-1], pickle.dumps(("a", "b"))],
)
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="pickle"):
        read_pickled_text(data)


def test_compressed_tests_are_not_unpacked_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_text, "MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        read_compressed_text(packed("x" * (2 << 20)))
    assert len(read_compressed_text(packed("x" * 1000))) == 1000


@pytest.mark.parametrize(
    ("source", "calls", "check"),
    [
        ("assert f(1) == 2", ("f(1)",), "assert __value_0 == 2"),
        ("assert f(g(1), [2]) == g(3)", ("f(g(1), [2])", "g(3)"), "assert __value_0 == __value_1"),
        ("assert sorted(f(1)) == [2], 'wrong'", ("f(1)",), "assert sorted(__value_0) == [2]"),
        ("assert f('a').startswith('b')", ("f('a')",), "assert __value_0.startswith('b')"),
        ("assert Solution().f(1) == 2", ("Solution().f(1)",), "assert __value_0 == 2"),
        ("assert f(lambda x: x + 1, [y for y in (1, 2)])", ("f(lambda x: x + 1, [y for y in (1, 2)])",), "assert __value_0"),
        ("assert all(x in f(1) for x in (1, 2))", ("f(1)",), "assert all((x in __value_0 for x in (1, 2)))"),
        ("assert len(f(1)) == 2", ("f(1)",), "assert len(__value_0) == 2"),
    ],
)
def test_only_the_calls_of_an_assertion_go_to_the_program(source: str, calls: tuple[str, ...], check: str) -> None:
    (assertion,) = split_assertion(source)
    assert (assertion.calls, assertion.check) == (calls, check)
