"""Countdown: write an expression that equals a target, using each of the given numbers at most once.

Problems are worded for full-size models, or short for tiny ones: 3,7,5=21: is answered 3*7. The
reward is `areal_x.rewards.countdown.countdown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

import gin

from areal_x import Task, at_least, one_of, within

TRAINING, HELD_OUT = 20_000, 200  # problems
WORDS = (
    "Using the numbers {numbers}, write an expression that equals {target}. You may use + - * / and"
    " parentheses, and each number at most once. Think step by step, and put the expression within"
    " <answer> </answer>, for example <answer>(1+2)/3</answer>."
)


@dataclass(frozen=True)
class Problem:
    """A countdown problem with an expression that solves it."""

    numbers: tuple[int, ...]
    target: int
    expression: str

    @property
    def short(self) -> str:
        return f"{','.join(map(str, self.numbers))}={self.target}:"


@gin.configurable(module="countdown")
def problems(
    split: Literal["train", "test"] = "train",
    numbers: Sequence[int] = (3, 4),
    largest: int = 99,
    highest: int = 999,
    wording: Literal["words", "short"] = "words",
    seed: int = 0,
) -> list[Task]:
    """Returns 20,000 solvable problems or, for the split "test", 200 others, the same for every
    seed.

    Args:
        split: "train" or "test".
        numbers: How many numbers a problem has; each choice is equally likely.
        largest: Largest number; the smallest is 1.
        highest: Largest target; the smallest is 1.
        wording: "words" for a user message, "short" for plain text.
        seed: Seed of the training problems.
    """
    one_of("countdown.problems.split", split, ("train", "test"))
    one_of("countdown.problems.wording", wording, ("words", "short"))
    at_least("countdown.problems.numbers", min(numbers), 2)
    within("countdown.problems.largest", largest, 9, 1000)
    within("countdown.problems.highest", highest, 20, 10**6)
    drawn = drawn_problems(Random("held out"), numbers, largest, highest)
    test: dict[str, Problem] = {}
    while len(test) < HELD_OUT:
        problem = next(drawn)
        test[problem.short] = problem
    drawn = drawn_problems(Random(f"training {seed}"), numbers, largest, highest)
    unseen = (problem for problem in drawn if problem.short not in test)
    chosen = test.values() if split == "test" else islice(unseen, TRAINING)
    return [task_of(problem, wording) for problem in chosen]


def drawn_problems(
    random: Random, numbers: Sequence[int], largest: int, highest: int
) -> Iterator[Problem]:
    """Yields random problems endlessly; no target is one of the problem's numbers."""
    while True:
        given = tuple(random.randint(1, largest) for _ in range(random.choice(numbers)))
        target, expression = combined(random, given, highest)
        if expression and target not in given:
            yield Problem(given, target, expression)


def combined(random: Random, given: Sequence[int], highest: int) -> tuple[int, str]:
    """Combines two or more of the numbers at random, one after the other, and returns the value and
    the expression.

    The expression is empty if the value is not an integer from 1 to `highest`.
    """
    first, *others = random.sample(given, random.randint(2, len(given)))
    value, expression = first, str(first)
    for other in others:
        operation = random.choice("+-*/")
        if operation == "/" and value % other:
            return 0, ""
        value = {"+": value + other, "-": value - other, "*": value * other, "/": value // other}[
            operation
        ]
        if not 1 <= value <= highest:
            return 0, ""
        summed = operation in "*/" and ("+" in expression or "-" in expression)
        expression = (
            f"({expression}){operation}{other}" if summed else f"{expression}{operation}{other}"
        )
    return value, expression


def task_of(problem: Problem, wording: str) -> Task:
    """The problem as a task; `wording` is "words" for a user message or "short" for plain text."""
    answer = {"numbers": list(problem.numbers), "target": problem.target}
    if wording == "short":
        return Task(problem.short, problem.short, answer)
    words = WORDS.format(numbers=", ".join(map(str, problem.numbers)), target=problem.target)
    return Task(problem.short, [{"role": "user", "content": words}], answer)
