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
    """A record with a `prompt` (text or chat messages) and an `answer`; its other fields are the
    task's metadata."""
    rest = {name: value for name, value in record.items() if name not in ("prompt", "answer")}
    return Task(id, record["prompt"], record["answer"], rest)


@gin.configurable
def load_dataset(
    path: str, split: str = "train", subset: str | None = None, to_task: ToTask = prompt_and_answer
) -> Sequence[Task]:
    """The tasks of one split, in its order.

    path: a .jsonl file (then `split` is not used), a directory that holds <split>.jsonl, or a name
    on the hub, which needs the package `datasets`. subset: the hub's configuration of that name
    ("main" of openai/gsm8k). to_task: `(record, id) -> Task`; id is "split/number of the record",
    from 0. Raises: UserError for a path that is none of these, a line that is not a JSON object (by
    its number), a field that `to_task` asks for and the record lacks (naming those it has), and a
    hub that cannot be used.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return _tasks(_lines(source), source.stem, to_task)
    if source.is_dir():
        file = source / f"{split}.jsonl"
        if not file.is_file():
            splits = sorted(f.stem for f in source.glob("*.jsonl"))
            raise UserError(
                f"{source} has no {split}.jsonl: it holds"
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
    """Records, each with the place to name in an error, as tasks."""
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
            raise UserError(_refusal(error, place, record, to_task)) from error
        tasks.append(_checked(task, place, to_task))
    return tasks


def _refusal(error: Exception, place: str, record: Record, to_task: ToTask) -> str:
    """What `to_task` could not do with the record of this place."""
    lacking = sentence(error)  # not its args: gin hands on a copy without them
    field = lacking[1:-1] if isinstance(error, KeyError) and lacking[:1] in ("'", '"') else None
    if field is not None and field not in record:
        there = ", ".join(map(repr, record)) or "none"
        asked = f", which {where} asks for" if (where := place_of(error)) else ""
        return (
            f"{place} has no field {field!r}{asked}: it has {there}{nearest(field, list(record))}"
        )
    name = getattr(to_task, "__name__", repr(to_task))
    return (
        f"load_dataset.to_task = {name}, called as {name}(record, id) with {place}, raised"
        f" {described(error)}"
    )


def _checked(task: Any, place: str, to_task: ToTask) -> Task:
    name = getattr(to_task, "__name__", repr(to_task))
    if not isinstance(task, Task):
        made = f"load_dataset.to_task = {name} made {type(task).__name__} of {place}"
        raise UserError(f"{made}: it must return areal_x.types.Task(id, prompt, answer)")
    if not isinstance(task.prompt, (str, Sequence)) or not all(
        isinstance(m, (str, Mapping)) for m in task.prompt
    ):
        made = (
            f"load_dataset.to_task = {name} made a task of {place} whose prompt is"
            f" {type(task.prompt).__name__}"
        )
        raise UserError(
            f"{made}: it must be a text, or a list of messages such as {{'role': 'user', 'content':"
            " 'text'}"
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
    except (
        Exception
    ) as error:  # of the network, of the hub, of the name: each library below has its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the dataset {name!r} (split {split!r}) could not be fetched from the hub"
            f" ({type(error).__name__}: {reason}): check the name and the network, or give a .jsonl"
            " file"
        ) from None
    for number, record in enumerate(records):
        yield f"record {number} of {name}", record
