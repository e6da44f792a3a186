"""Parquet, Arrow and lazily read datasets, mixtures and preference pairs."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.errors import ConfigError, UserError
from areal_x.tasks import records
from areal_x.tasks.datasets import load_dataset
from areal_x.tasks.mixture import mixture
from areal_x.tasks.preferences import preference_task
from areal_x.types import Task

ROWS = [{"prompt": f"p{i}", "answer": str(i), "level": i % 3, "tags": ["a", "b"][: i % 3]} for i in range(25)]


def write(folder, kind):
    """The rows in one file of this kind, or in two parts."""
    if kind == "jsonl":
        file = folder / "train.jsonl"
        file.write_text("\n".join(json.dumps(row) + ("\n" if i % 5 == 0 else "") for i, row in enumerate(ROWS)) + "\n")
        return
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "parquet":
        parquet.write_table(table, folder / "train.parquet", row_group_size=4)
    if kind == "parts":
        for number, (first, rows) in enumerate(((0, 10), (10, 15))):
            parquet.write_table(table.slice(first, rows), folder / f"train-0000{number}-of-00002.parquet", row_group_size=4)
    if kind == "feather":
        feather.write_feather(table, folder / "train.feather", chunksize=6)
    if kind == "stream":
        with pyarrow.ipc.new_stream(str(folder / "train.arrow"), table.schema) as out:
            out.write_table(table, max_chunksize=6)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parts", "feather", "stream"])
@pytest.mark.parametrize("lazy", [False, True])
def test_every_form_gives_the_same_tasks_at_once_and_one_by_one_in_any_order(kind, lazy, tmp_path):
    write(tmp_path, kind)
    found = load_dataset(str(tmp_path), lazy=lazy)
    expected = [
        Task(f"train/{i}", row["prompt"], row["answer"], {"level": row["level"], "tags": row["tags"]})
        for i, row in enumerate(ROWS)
    ]
    assert len(found) == 25
    assert list(found) == expected
    assert [found[i] for i in (24, 3, -1, 0, 17)] == [expected[i] for i in (24, 3, -1, 0, 17)]
    assert isinstance(found, list) != lazy
    with pytest.raises(IndexError):
        found[25]


def test_no_more_than_a_few_row_groups_are_in_memory_at_once(tmp_path, monkeypatch):
    write(tmp_path, "parquet")
    monkeypatch.setattr(records, "KEPT_GROUPS", 2)
    made = records.open_records(tmp_path / "train.parquet")
    read, original = [], made._read
    made._read = lambda number: read.append(number) or original(number)
    assert [made.at(i)[1]["prompt"] for i in (0, 1, 24, 3, 8, 0)] == ["p0", "p1", "p24", "p3", "p8", "p0"]
    assert read == [0, 6, 2]  # 0 was used after 6, which left
    assert len(made._kept) == 2


def test_a_lazily_read_mistake_is_named_when_its_record_is_used(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "a", "answer": 1}\n\n{"prompt": \n{"answer": 2}\n{"prompt": "\xff"}\n')
    found = load_dataset(str(file), lazy=True)
    assert found[0] == Task("x/0", "a", 1)
    for index, sentence in (
        (1, r"x\.jsonl:3 is not JSON"),
        (2, r"x\.jsonl:4 has no field 'prompt'"),
        (3, r":5 is not JSON"),
    ):
        with pytest.raises(UserError, match=sentence):
            found[index]


def test_files_that_cannot_be_read_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"train\.parquet (cannot be read|needs the package pyarrow)"):
        load_dataset(str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'areal-x\[parquet\]'"):
        load_dataset(str(tmp_path))
    with pytest.raises(UserError, match=r"has no test\.jsonl: it contains train\.parquet"):
        load_dataset(str(tmp_path), "test")


def tasks(name, number):
    return [Task(str(i), f"{name}{i}", None, {"of": name}) for i in range(number)]


def test_a_mixture_has_the_shares_that_it_was_given_and_repeats_what_is_too_small():
    mixed = mixture(datasets=[tasks("a", 4), tasks("b", 100)], names=["a", "b"], weights=[3, 1], size=40)
    found = list(mixed)
    assert Counter(t.metadata["source"] for t in found) == {"a": 30, "b": 10}
    assert Counter(t.prompt for t in found if t.metadata["source"] == "a") == {"a0": 8, "a1": 8, "a2": 7, "a3": 7}
    assert [t.prompt for t in found if t.metadata["source"] == "b"] == [f"b{i}" for i in range(0, 100, 10)]
    assert (found[0].id, found[0].metadata) == ("a/0", {"of": "a", "source": "a"})
    assert mixed[-1] == found[-1]
    with pytest.raises(IndexError):
        mixed[40]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 9)), min_size=1, max_size=5), st.integers(1, 60))
def test_the_shares_of_a_mixture_are_its_weights_to_less_than_one_task(parts, size):
    names = [str(i) for i in range(len(parts))]
    weights = [weight for _, weight in parts]
    mixed = mixture(datasets=[tasks("x", n) for n, _ in parts], names=names, weights=weights, size=size)
    counts = mixed.counts()
    assert sum(counts) == len(mixed) == size
    assert all(abs(c - size * w / sum(weights)) < 1 + 1e-6 for c, w in zip(counts, weights, strict=True))
    whole = mixture(datasets=[tasks("x", n) for n, _ in parts], names=names)
    assert whole.counts() == [n for n, _ in parts]


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"names": ["a", "a"]}, r"mixture\.names"),
        ({"weights": [1]}, r"mixture\.weights = \[1\] .* 2 numbers"),
        ({"weights": [1, 0]}, r"mixture\.weights = 0"),
        ({"size": 0}, r"mixture\.size"),
        ({"datasets": [[], tasks("b", 1)]}, "each a task"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused(changes, error):
    with pytest.raises((ConfigError, UserError), match=error):
        mixture(**{"datasets": [tasks("a", 1), tasks("b", 1)], "names": ["a", "b"]} | changes)


def test_transcripts_messages_and_texts_become_the_same_kind_of_pair():
    start = "\n\nHuman: Is it\n\nraining? Human: no turn\n\nAssistant: Yes.\n\nHuman: And now?\n\nAssistant:"
    wanted = [
        {"role": "user", "content": "Is it\n\nraining? Human: no turn"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ]
    pair = preference_task({"chosen": f"{start} No.", "rejected": f"{start} Go away.", "n": 1}, "x")
    assert pair == Task("x", wanted, {"chosen": "No.", "rejected": "Go away."}, {"n": 1})
    ends = {"chosen": {"role": "assistant", "content": "No."}, "rejected": {"role": "assistant", "content": "Go away."}}
    assert preference_task({name: [*wanted, end] for name, end in ends.items()} | {"n": 1}, "x") == pair
    assert preference_task({"prompt": wanted} | {name: [end] for name, end in ends.items()} | {"n": 1}, "x") == pair
    assert preference_task({"prompt": wanted} | {n: [*wanted, end] for n, end in ends.items()} | {"n": 1}, "x") == pair
    asked = preference_task({"prompt": "Is it?"} | {name: [end] for name, end in ends.items()}, "x")
    assert asked.prompt == [{"role": "user", "content": "Is it?"}]
    plain = preference_task({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "x")
    assert plain == Task("x", "2+2=", {"chosen": "4", "rejected": "5"}, {})


@pytest.mark.parametrize(
    "record, sentence",
    [
        ({"chosen": "4", "rejected": "5"}, "answers that are texts, and no prompt"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}, "differ before their last"),
        ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}, "does not end with the assistant's"),
        ({"chosen": [], "rejected": []}, "does not end with the assistant's"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(record, sentence):
    with pytest.raises(UserError, match=sentence):
        preference_task(record, "x")
