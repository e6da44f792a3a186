"""The reward by math-verify for the forms that answers take in practice."""

from __future__ import annotations

import pytest

from areal_x.rewards.math import math_answer
from areal_x.types import Task

pytest.importorskip("math_verify")


def judge(answer: object, text: str) -> float:
    return math_answer(Task("7", "how many?", answer), text)


@pytest.mark.parametrize(
    "text",
    [
        r"So she has \boxed{42} left.",
        "the answer is 42.",
        "The final answer is: $42$",
        "42 dollars",
        "$42.00",
        r"\boxed{\$42}",
        r"\boxed{42 \text{ dollars}}",
        "40 + 2 = 42",
        "It could be 41. But no: **42**",
    ],
)
def test_a_right_answer_counts_in_any_form(text: str) -> None:
    assert judge("He buys 40+2=<<40+2=42>>42.\n#### 42", text) == 1.0


@pytest.mark.parametrize(
    "text", ["", "no idea", "41", "420", "-42", "4 2", r"\boxed{", r"\boxed{}", "42 is wrong, it is 43", "\x00"]
)
def test_a_wrong_or_no_answer_does_not(text: str) -> None:
    assert judge("#### 42", text) == 0.0


@pytest.mark.parametrize(
    "text", ["$1,234", "1234", r"\boxed{1,234}", r"\boxed{\$1,234.00}", "1,234 apples", r"\boxed{1{,}234}"]
)
def test_thousands_may_be_divided(text: str) -> None:
    assert judge("x = 1,234\n#### 1,234", text) == 1.0
    assert judge("#### 1234", text) == 1.0
    assert judge("#### 1.234", text) == 0.0


@pytest.mark.parametrize("text", ["3/4", "0.75", r"\boxed{\frac34}", r"$\dfrac{6}{8}$"])
def test_fractions_are_compared_by_value(text: str) -> None:
    assert judge(r"\frac{3}{4}", text) == 1.0
    assert judge("#### 4", text) == 0.0


def test_the_box_wins_over_what_follows_it() -> None:
    assert judge("#### 42", r"\boxed{42}, not 41") == 1.0
    assert judge("#### 42", r"\boxed{41}, not 42") == 0.0


@pytest.mark.parametrize("answer", ["#### ", "", None])
def test_a_task_without_a_readable_answer_is_an_error_not_a_zero(answer: object) -> None:
    with pytest.raises(ValueError, match="answer of task 7 is not a number"):
        judge(answer, "42")
