"""The addition task: what it draws, how the tutor answers, what the verifier lets through."""

from __future__ import annotations

import re

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.types import Task
from examples.arithmetic.task import ALPHABET, LONGEST, demonstration, demonstrations, held_out, problems, verify

PROBLEM = re.compile(r"(\d{1,4})\+(\d{1,4})=")


def always() -> bool:
    return True


def operands(task: Task) -> tuple[int, int]:
    found = PROBLEM.fullmatch(str(task.prompt))
    assert found, task
    return int(found[1]), int(found[2])


def carries(a: int, b: int) -> int:
    """Returns the number of columns with a carry, computed by arithmetic alone."""
    width = max(len(str(a)), len(str(b)))
    return sum(a % 10**i + b % 10**i >= 10**i for i in range(1, width))


def test_problems_are_fixed_by_the_seed() -> None:
    assert problems(300, seed=1) == problems(300, seed=1)
    assert problems(300, seed=1)[:100] == problems(100, seed=1)
    assert problems(300, seed=1) != problems(300, seed=2)
    assert held_out() == held_out()


def test_each_problem_is_a_sum_and_its_answer() -> None:
    for task in [*problems(500), *held_out()]:
        a, b = operands(task)
        assert task.answer == str(a + b)
        assert task.id == f"{a}+{b}"


def test_operands_have_1_to_4_digits_equally_often_and_independently() -> None:
    digits = np.array([[len(str(x)) for x in operands(task)] for task in problems(16_000)])
    shares = np.histogram2d(digits[:, 0], digits[:, 1], bins=[1, 2, 3, 4, 5])[0] / len(digits)
    np.testing.assert_allclose(shares, 1 / 16, atol=0.01)  # 5 standard deviations


def test_no_held_out_pair_is_among_the_problems_in_either_order() -> None:
    unseen = {operands(task) for task in held_out()}
    assert len({frozenset(pair) for pair in unseen}) == 500
    assert all(min(pair) >= 10 for pair in unseen)
    for seed in range(3):
        seen = {operands(task) for task in problems(20_000, seed)}
        assert not seen & unseen
        assert not seen & {(b, a) for a, b in unseen}


def test_held_out_gives_the_first_of_the_same_500() -> None:
    assert held_out(7) == held_out()[:7]
    with pytest.raises(UserError, match=r"arithmetic\.held_out\.count"):
        held_out(501)


@pytest.mark.parametrize(
    "prompt, answer",
    [
        ("730+8594=", "0+4=4,3+9=12,7+5+1=13,0+8+1=9>9324"),
        ("7+8=", "7+8=15>15"),
        ("95+5=", "5+5=10,9+0+1=10>100"),
        ("0+0=", "0+0=0>0"),
    ],
)
def test_a_demonstration_without_forgetting_is_worked_addition(prompt: str, answer: str) -> None:
    assert demonstration(Task("", prompt)) == answer


def test_a_forgotten_carry_is_missing_from_the_next_column_and_from_the_result() -> None:
    assert demonstration(Task("", "730+8594="), always) == "0+4=4,3+9=12,7+5=12,0+8=8>8224"
    assert demonstration(Task("", "7+8="), always) == "7+8=15>15"  # there is no column to forget it in


def test_demonstrations_without_forgetting_are_all_right() -> None:
    tasks = problems(2000)
    assert all(verify(task, answer) == 1.0 for task, answer in zip(tasks, demonstrations(tasks, 0.0, seed=0), strict=True))


def test_a_tutor_who_forgets_everything_is_right_where_nothing_is_carried() -> None:
    tasks = problems(2000)
    for task, answer in zip(tasks, demonstrations(tasks, 1.0, seed=0), strict=True):
        assert verify(task, answer) == (carries(*operands(task)) == 0)


def test_forgetful_demonstrations_are_right_as_often_as_no_carry_is_forgotten() -> None:
    tasks = problems(8000)
    right = np.mean([verify(task, answer) for task, answer in zip(tasks, demonstrations(tasks, 0.65, seed=0), strict=True)])
    # A forgotten carry may spare a later one, but what is wrong below the highest carry stays wrong.
    kept = np.mean([0.35 ** carries(*operands(task)) for task in tasks])
    assert abs(right - kept) < 0.02


def test_the_warm_start_has_something_to_mend() -> None:
    assert 0.2 < np.mean([carries(*operands(task)) == 0 for task in held_out()]) < 0.35


def test_the_verifier_rejects_near_misses() -> None:
    task = Task("", "730+8594=", "9324")
    assert verify(task, "0+4=4,3+9=12,7+5+1=13,0+8+1=9>9324") == 1.0
    assert verify(task, ">9324") == 1.0  # the steps are not judged
    for wrong in ("", "9324", ">", ">9325", ">932", ">93240", ">09324", ">9324>", ">9324 ", ">>9324", ">1>9324", "9324>"):
        assert verify(task, wrong) == 0.0, wrong


def test_problems_and_answers_stay_within_the_alphabet_and_the_longest() -> None:
    tasks = problems(5000)
    texts = [task.prompt + answer for task, answer in zip(tasks, demonstrations(tasks, 0.0, seed=0), strict=True)]
    assert set("".join(texts)) == set(ALPHABET)
    assert max(map(len, texts)) + 1 <= LONGEST
    assert len("9999+9999=" + demonstration(Task("", "9999+9999="))) + 1 == LONGEST
