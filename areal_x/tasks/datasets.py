"""Tasks from jsonl, Parquet or Arrow files, a directory of them, or the Hugging Face hub."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import gin

from areal_x.errors import UserError, described, nearest, place_of, sentence
from areal_x.tasks.records import SUFFIXES, Records, each, files_of, open_records
from areal_x.types import Task

Record = Mapping[str, Any]
ToTask = Callable[[Record, str], Task]


def prompt_and_answer(record: Record, id: str) -> Task:
    """Makes a task of a record with a `prompt` (text or chat messages) and an `answer`; its other
    fields become the task's metadata."""
    rest = {name: value for name, value in record.items() if name not in ("prompt", "answer")}
    return Task(id, record["prompt"], record["answer"], rest)


@gin.configurable
def load_dataset(
    path: str,
    split: str = "train",
    subset: str | None = None,
    to_task: ToTask = prompt_and_answer,
    lazy: bool = False,
) -> Sequence[Task]:
    """Loads the tasks of one split, in its order.

    Args:
        path: A .jsonl, .parquet, .arrow or .feather file, a directory that contains <split>.jsonl (or
            with another of these endings, or in parts <split>-*.parquet), or a dataset's name on the
            hub, which needs the package `datasets`. Parquet and Arrow need `pyarrow`.
        split: Name of the split; ignored for a file.
        subset: The dataset's configuration on the hub, such as "main" of openai/gsm8k.
        to_task: `(record, id) -> Task`, where id is "split/number of the record", from 0.
        lazy: True leaves the records in their files and reads each when it is used, for datasets that
            are larger than memory; a mistake in a record then ends the run when it is drawn.

    Raises: UserError for a path that is none of these, a line that is not a JSON object (with its
    number), a field that `to_task` reads and the record lacks (with those it has), and a hub that
    cannot be used.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return _of_files([source], source.stem, to_task, lazy)
    if source.is_dir():
        files = files_of(source, split)
        if not files:
            there = sorted(f.name for f in source.iterdir() if f.suffix in SUFFIXES)
            raise UserError(
                f"{source} has no {split}.jsonl: it contains {', '.join(there) or 'no .jsonl file'}"
                f"{nearest(split, [Path(name).stem for name in there])}"
            )
        return _of_files(files, split, to_task, lazy)
    if source.is_absolute() or source.suffix or path.count("/") != 1 or path.startswith("."):
        raise UserError(
            f"the dataset {path!r} does not exist: give a .jsonl file, a directory of them, or a"
            " hub name"
        )
    return _tasks(_hub(path, split, subset), split, to_task)


class LazyTasks(Sequence[Task]):
    """Tasks whose records stay in their files. Raises: UserError for a mistake in the record of a task
    that is read."""

    def __init__(self, parts: Sequence[Records], split: str, to_task: ToTask) -> None:
        self._parts, self._split, self._to_task = parts, split, to_task
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        place, record = self._parts[number].at(index - first)
        return _task(place, record, f"{self._split}/{index}", self._to_task)


def _of_files(files: Sequence[Path], split: str, to_task: ToTask, lazy: bool) -> Sequence[Task]:
    parts = [open_records(file) for file in files]
    if lazy:
        return LazyTasks(parts, split, to_task)
    return _tasks((found for part in parts for found in each(part)), split, to_task)


def _tasks(records: Iterator[tuple[str, Any]], split: str, to_task: ToTask) -> list[Task]:
    """Turns records, each with its place for error messages, into tasks."""
    return [
        _task(place, record, f"{split}/{number}", to_task)
        for number, (place, record) in enumerate(records)
    ]


def _task(place: str, record: Any, id: str, to_task: ToTask) -> Task:
    """Returns the task of a record. Raises: UserError with its place."""
    if not isinstance(record, Mapping):
        raise UserError(
            f"{place} is not a JSON object but {type(record).__name__}: write one object a line"
        )
    try:
        task = to_task(record, id)
    except UserError:
        raise
    except Exception as error:
        raise UserError(_explain(error, place, record, to_task)) from error
    return _checked(task, place, to_task)


def _explain(error: Exception, place: str, record: Record, to_task: ToTask) -> str:
    """One sentence on an error that `to_task` raised for a record."""
    text = sentence(error)  # not error.args: gin raises a copy without them
    field = text[1:-1] if isinstance(error, KeyError) and text[:1] in ("'", '"') else None
    if field is not None and field not in record:
        present = ", ".join(map(repr, record)) or "none"
        reader = f", which {where} reads" if (where := place_of(error)) else ""
        return (
            f"{place} has no field {field!r}{reader}: it has {present}"
            f"{nearest(field, list(record))}"
        )
    name = getattr(to_task, "__name__", repr(to_task))
    return (
        f"load_dataset.to_task = {name}, called as {name}(record, id) with {place}, raised"
        f" {described(error)}"
    )


def _checked(task: Any, place: str, to_task: ToTask) -> Task:
    """Returns the task. Raises: UserError if `to_task` made something else."""
    name = getattr(to_task, "__name__", repr(to_task))
    if not isinstance(task, Task):
        made = f"load_dataset.to_task = {name} returned {type(task).__name__} for {place}"
        raise UserError(f"{made}: it must return areal_x.types.Task(id, prompt, answer)")
    if not isinstance(task.prompt, (str, Sequence)) or not all(
        isinstance(m, (str, Mapping)) for m in task.prompt
    ):
        made = (
            f"load_dataset.to_task = {name} returned a task for {place} whose prompt is"
            f" {type(task.prompt).__name__}"
        )
        raise UserError(
            f"{made}: it must be a string, or a list of messages such as {{'role': 'user',"
            " 'content': 'text'}"
        )
    return task


def _hub(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"the dataset {name!r} is on the hub, which needs a package (pip install"
            " 'areal-x[hub]'); or give a .jsonl file or a directory of them"
        ) from None
    try:
        records = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, hub or name: every library below has errors of its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the dataset {name!r} (split {split!r}) could not be fetched from the hub"
            f" ({type(error).__name__}: {reason}): check the name and the network, or give a .jsonl"
            " file"
        ) from None
    for number, record in enumerate(records):
        yield f"record {number} of {name}", record
