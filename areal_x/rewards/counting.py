"""The reward for a number: how many there are, which is the largest."""

from __future__ import annotations

import re

import gin

from areal_x.tasks.answer_tags import tagged_answer
from areal_x.types import Task

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@gin.configurable
def number_answer(task: Task, text: str) -> float:
    """1.0 if the answer in `text` is the number `task.answer`, else 0.0.

    The answer is the last number in the last <answer> </answer>, or without one in the whole text;
    7, 7.0 and 1,000 for 1000 are the same numbers.

    Raises: ValueError for a task whose answer is no number.
    """
    wanted = last_number(str(task.answer))
    if wanted is None:
        raise ValueError(f"the answer of task {task.id} is no number: {task.answer!r}")
    return float(last_number(tagged_answer(text)) == wanted)


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
