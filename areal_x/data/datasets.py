"""Tasks from a jsonl file, a directory of them, or the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from areal_x.errors import UserError, nearest
from areal_x.types import Task

Record = Mapping[str, Any]
ToTask = Callable[[Record, str], Task]


def prompt_and_answer(record: Record, id: str) -> Task:
    """A record with a `prompt` (text or chat messages) and an `answer`; its other fields are the task's metadata."""
    rest = {name: value for name, value in record.items() if name not in ("prompt", "answer")}
    return Task(id, record["prompt"], record["answer"], rest)


@gin.configurable
def load_dataset(
    path: str, split: str = "train", subset: str | None = None, to_task: ToTask = prompt_and_answer
) -> Sequence[Task]:
    """The tasks of one split, in its order.

    path: a .jsonl file (then `split` is not used), a directory that holds <split>.jsonl, or a name on the hub, which needs the
    package `datasets`. subset: the hub's configuration of that name ("main" of openai/gsm8k).
    to_task: `(record, id) -> Task`; id is "split/number of the record", from 0.
    Raises: UserError for a path that is none of these, a line that is not a JSON object (by its number), a field that `to_task`
    asks for and the record lacks (naming those it has), and a hub that cannot be used.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return _tasks(_lines(source), source.stem, to_task)
    if source.is_dir():
        file = source / f"{split}.jsonl"
        if not file.is_file():
            splits = sorted(f.stem for f in source.glob("*.jsonl"))
            raise UserError(
                f"{source} has no {split}.jsonl: it holds {', '.join(f'{s}.jsonl' for s in splits) or 'no .jsonl file'}"
                f"{nearest(split, splits)}"
            )
        return _tasks(_lines(file), split, to_task)
    if source.is_absolute() or source.suffix or path.count("/") != 1 or path.startswith("."):
        raise UserError(f"the dataset {path!r} does not exist: give a .jsonl file, a directory of them, or a hub name")
    return _tasks(_hub(path, split, subset), split, to_task)


def _tasks(records: Iterator[tuple[str, Any]], split: str, to_task: ToTask) -> list[Task]:
    """Records, each with the place to name in an error, as tasks."""
    tasks = []
    for number, (place, record) in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f"{place} is not a JSON object but {type(record).__name__}: write one object a line")
        try:
            tasks.append(to_task(record, f"{split}/{number}"))
        except KeyError as error:
            field = error.args[0]
            if field in record:
                raise
            raise UserError(
                f"{place} has no field {field!r}: it has {', '.join(map(repr, record)) or 'none'}{nearest(field, list(record))}"
            ) from None
    return tasks


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{file}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{file}:{number} is not JSON ({error.msg} at column {error.colno})") from None


def _hub(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"the dataset {name!r} is on the hub, which needs a package (pip install 'areal-x[hub]'); "
            "or give a .jsonl file or a directory of them"
        ) from None
    try:
        records = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # of the network, of the hub, of the name: each library below has its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the dataset {name!r} (split {split!r}) could not be fetched from the hub ({type(error).__name__}: {reason}): "
            "check the name and the network, or give a .jsonl file"
        ) from None
    for number, record in enumerate(records):
        yield f"record {number} of {name}", record
