"""The reward for a number."""

from __future__ import annotations

import pytest

from areal_x.rewards.counting import number_answer
from areal_x.types import Task


@pytest.mark.parametrize(
    "answer, text, reward",
    [
        ("3", "I see 2 cubes and 1 ball: <answer> 3 </answer>", 1.0),
        ("3", "<answer>2</answer> no, <answer>3</answer> of 9", 1.0),
        ("3", "<answer>3</answer> or <answer>2</answer>", 0.0),
        ("3", "3 of 4", 0.0),
        ("3", "there are 3.0", 1.0),
        ("1000", "<answer>1,000</answer>", 1.0),
        ("-2", "x = -2", 1.0),
        ("2", "x = -2", 0.0),
        ("3", "three", 0.0),
        ("3", "<answer></answer> 3", 0.0),
        (3, "3", 1.0),
    ],
)
def test_the_last_number_of_the_answer_counts(answer: str, text: str, reward: float) -> None:
    assert number_answer(Task("t", "", answer), text) == reward


def test_an_answer_that_is_no_number_is_the_tasks_mistake() -> None:
    with pytest.raises(ValueError, match="the answer of task t is no number: 'many'"):
        number_answer(Task("t", "", "many"), "3")
