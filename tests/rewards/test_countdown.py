"""The countdown reward against a search of all expressions."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.rewards.countdown import countdown
from areal_x.types import Task


def judge(text: str, numbers: tuple[int, ...] = (3, 7, 50, 2), target: int = 71, partial: float = 0.0) -> float:
    return countdown(Task("1", "", {"numbers": list(numbers), "target": target}), text, partial)


@pytest.mark.parametrize(
    "text",
    [
        "3*7+50",
        "(50+3*7)",
        "50 + 7 × 3",
        "First I tried 50+7.\n<answer>50-3+7</answer>\nNo:\n<answer> 3*7 + 50 = 71 </answer> That is it.",
        "I add them:\n3*7+50=71\n\n",
        "50+(3*7)",
    ],
)
def test_a_right_expression_counts_wherever_it_stands(text: str) -> None:
    assert judge(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "71",  # is not among the numbers
        "50+7+7+7",  # there is one 7
        "50+21",
        "(50*2+7*3*2)/2",
        "3*7+50 or so",
        "3*7+50; 1",
        "__import__('os').system('true')",
        "3**2",
        "7//3",
        "50-(-7)",
        "50.0+3*7",
        "True",
        "50+7*3j",
        "50/(7-7)",
        "50/0",
        "((((",
        "(" * 400,
        "3*7+50" + " " * 20 + "+0" * 400,
        "\x00",
        "<answer>3*7+50",
    ],
)
def test_anything_else_does_not(text: str) -> None:
    assert judge(text, partial=0.0) == 0.0


def test_division_is_exact() -> None:
    assert judge("7/(3/2)*3", (7, 3, 2, 3), 14) == 1.0
    assert judge("7/2", (7, 2), 3, partial=0.25) == 0.25


def test_another_value_is_partly_right_and_what_is_not_allowed_is_not() -> None:
    assert judge("50+7", partial=0.1) == 0.1
    assert judge("50+8", partial=0.1) == 0.0
    assert judge("50/(3-3)", (3, 3, 50), partial=0.1) == 0.0


def test_a_number_counts_as_often_as_it_is_given() -> None:
    assert judge("5+5", (5, 5), 10) == 1.0
    assert judge("5+5", (5, 6), 10) == 0.0


@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.integers(1, 60))
def test_of_all_expressions_of_three_numbers_those_count_that_give_the_target(numbers: list[int], target: int) -> None:
    operations = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}
    for (a, b, c), (one, two) in product(permutations(map(Fraction, numbers)), product(operations, repeat=2)):
        try:
            value = operations[two](operations[one](a, b), c)
        except ZeroDivisionError:
            continue
        assert judge(f"({a}{one}{b}){two}{c}", tuple(numbers), target) == float(value == target)


@pytest.mark.parametrize("answer", [None, 5, {"numbers": [1]}])
def test_a_task_without_numbers_is_an_error_and_no_zero(answer: object) -> None:
    with pytest.raises(ValueError, match="numbers"):
        countdown(Task("1", "", answer), "1")
