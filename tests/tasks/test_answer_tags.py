"""The answer between tags: that of the last pair, against a regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.tasks.answer_tags import tagged_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("so <answer> 7 </answer>.", " 7 "),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> no: <answer>2", "1"),
        ("<answer>1", "<answer>1"),
        ("1</answer>", "1</answer>"),
        ("<answer></answer> 3", ""),
    ],
)
def test_the_last_pair_counts(text: str, answer: str) -> None:
    assert tagged_answer(text) == answer


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "b\n"]), max_size=12).map("".join))
def test_it_is_what_a_regular_expression_finds(text: str) -> None:
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    assert tagged_answer(text) == (found[-1] if found else text)


@pytest.mark.timeout(10)
def test_many_tags_that_are_not_closed_take_no_time() -> None:
    assert tagged_answer("<answer>" * 200_000 + "7</answer>") == "7"
