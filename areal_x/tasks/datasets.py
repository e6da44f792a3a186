"""Tasks from a jsonl file, a directory of them, or the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from areal_x.errors import UserError, described, nearest, place_of, sentence
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
    path: str, split: str = "train", subset: str | None = None, to_task: ToTask = prompt_and_answer
) -> Sequence[Task]:
    """Loads the tasks of one split, in its order.

    Args:
        path: A .jsonl file, a directory that contains <split>.jsonl, or a dataset's name on the
            hub, which needs the package `datasets`.
        split: Name of the split; ignored for a .jsonl file.
        subset: The dataset's configuration on the hub, such as "main" of openai/gsm8k.
        to_task: `(record, id) -> Task`, where id is "split/number of the record", from 0.

    Raises: UserError for a path that is none of these, a line that is not a JSON object (with its
    number), a field that `to_task` reads and the record lacks (with those it has), and a hub that
    cannot be used.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return _tasks(_lines(source), source.stem, to_task)
    if source.is_dir():
        file = source / f"{split}.jsonl"
        if not file.is_file():
            splits = sorted(f.stem for f in source.glob("*.jsonl"))
            raise UserError(
                f"{source} has no {split}.jsonl: it contains"
                f" {', '.join(f'{s}.jsonl' for s in splits) or 'no .jsonl file'}"
                f"{nearest(split, splits)}"
            )
        return _tasks(_lines(file), split, to_task)
    if source.is_absolute() or source.suffix or path.count("/") != 1 or path.startswith("."):
        raise UserError(
            f"the dataset {path!r} does not exist: give a .jsonl file, a directory of them, or a"
            " hub name"
        )
    return _tasks(_hub(path, split, subset), split, to_task)


def _tasks(records: Iterator[tuple[str, Any]], split: str, to_task: ToTask) -> list[Task]:
    """Turns records, each with its place for error messages, into tasks."""
    tasks = []
    for number, (place, record) in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(
                f"{place} is not a JSON object but {type(record).__name__}: write one object a line"
            )
        try:
            task = to_task(record, f"{split}/{number}")
        except UserError:
            raise
        except Exception as error:
            raise UserError(_explain(error, place, record, to_task)) from error
        tasks.append(_checked(task, place, to_task))
    return tasks


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


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{file}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file}:{number} is not JSON ({error.msg} at column {error.colno})"
                ) from None


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
