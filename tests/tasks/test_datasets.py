"""Local files in the right and in the wrong form, and the hub where it cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import pytest

from areal_x.errors import UserError
from areal_x.tasks.datasets import load_dataset
from areal_x.types import Task


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_a_file_gives_its_records_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path / "sums.jsonl", {"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": [{"role": "user"}], "answer": 3}
    )
    assert load_dataset(str(file)) == [
        Task("sums/0", "1+1=", "2", {"level": 1}),
        Task("sums/1", [{"role": "user"}], 3),
    ]


def test_a_directory_gives_the_split_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "a", "answer": "b"})
    write(tmp_path / "test.jsonl", {"prompt": "c", "answer": "d"})
    assert [t.prompt for t in load_dataset(str(tmp_path))] == ["a"]
    assert load_dataset(str(tmp_path), "test") == [Task("test/0", "c", "d")]
    with pytest.raises(UserError, match=r"has no tset\.jsonl: it contains test\.jsonl, train\.jsonl; did you mean 'test'\?"):
        load_dataset(str(tmp_path), "tset")


def test_fields_are_read_as_the_caller_says(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"q": 1, "a": 2})
    tasks = load_dataset(str(file), to_task=lambda record, id: Task(id, f"{record['q']}?", record["a"]))
    assert tasks == [Task("x/0", "1?", 2)]


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "answer": 2}\n')
    assert [t.id for t in load_dataset(str(file))] == ["x/0", "x/1"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"x\.jsonl:2 is not JSON \("):
        load_dataset(str(file))


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.jsonl:1 is not a JSON object but list"):
        load_dataset(str(write(tmp_path / "x.jsonl", [1])))


def test_a_missing_field_is_named_beside_those_there(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"prompt": "a", "answer": 1}, {"prompts": "a", "answer": 1})
    with pytest.raises(UserError, match=r"x\.jsonl:2 has no field 'prompt': it has 'prompts', 'answer'; did you mean"):
        load_dataset(str(file))


@pytest.mark.parametrize("path", ["/no/where.jsonl", "no/where.jsonl", "./nowhere", "nowhere", "a/b/c"])
def test_a_path_that_is_nothing_is_said_to_be_nothing(path: str) -> None:
    with pytest.raises(UserError, match=f"the dataset {path!r} does not exist: give a .jsonl file"):
        load_dataset(path)


def test_a_hub_name_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'areal-x\[hub\]'"):
        load_dataset("openai/gsm8k", subset="main")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(UserError, match=r"'openai/gsm8k' .*ConnectionError: no route to the host\): check the name"):
        load_dataset("openai/gsm8k", subset="main")


def test_records_of_the_hub_become_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, subset: str, split: str) -> list[dict[str, str]]:
        assert (name, subset, split) == ("openai/gsm8k", "main", "test")
        return [{"prompt": "a", "answer": "b"}, {"answer": "c"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fetch))
    with pytest.raises(UserError, match="record 1 of openai/gsm8k has no field 'prompt': it has 'answer'"):
        load_dataset("openai/gsm8k", "test", "main")


def lacks_a_field(record, id):
    return Task(id, record["missing"], record["answer"])


def returns_a_dict(record, id):
    return {"id": id, "prompt": record["prompt"]}


def returns_a_number_as_prompt(record, id):
    return Task(id, 5)


def takes_one_argument(record):
    return record


def fails_in_a_library(record, id):
    return json.loads("{")


@pytest.mark.parametrize(
    "to_task, sentence",
    [
        (
            lacks_a_field,
            r"jsonl:1 has no field 'missing', which .*test_datasets\.py:\d+ in lacks_a_field reads: it has",
        ),
        (returns_a_dict, r"returns_a_dict returned dict for .*data\.jsonl:1: it must return areal_x\.types\.Task"),
        (returns_a_number_as_prompt, r"whose prompt is int: it must be a string, or a list of messages"),
        (takes_one_argument, r"called as takes_one_argument\(record, id\) with .*takes 1 positional argument but 2 were given"),
        (fails_in_a_library, r"JSONDecodeError: .*test_datasets\.py:\d+ in fails_in_a_library\)"),
    ],
)
@pytest.mark.parametrize("by_gin", [False, True])
def test_what_a_function_of_ones_own_does_wrong_is_one_sentence_with_its_line(tmp_path, to_task, sentence, by_gin):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    if by_gin:  # its wrapper raises a copy without args
        to_task = gin.external_configurable(to_task, f"{to_task.__name__}_{tmp_path.name}")
    with pytest.raises(UserError, match=sentence) as raised:
        load_dataset(str(file), to_task=to_task)
    assert "In call to configurable" not in str(raised.value).split("\n  In call to configurable 'load_dataset'")[0]
