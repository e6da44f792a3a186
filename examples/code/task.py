"""Programs of two steps: "square, halve:" is answered by a Python program that reads a number, squares
it, halves it and prints the result.

The reward is `areal_x.rewards.code.reward.code_tests`: 1 if the program prints the right number for
each of three inputs, which it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal

import gin

from areal_x import Task, one_of

HELD_OUT = 100  # of the 576 programs
INPUTS = 3  # tests of a program
LARGEST = 30  # input


@dataclass(frozen=True)
class Step:
    """One step of a program. words: in the prompt. compute: what it should do to the number. code:
    the statement that does. mistake: a statement that does not always, "" if none is typical."""

    words: str
    compute: Callable[[int], int]
    code: str
    mistake: str = ""


def all_steps() -> list[Step]:
    """Returns the 24 steps that programs consist of."""
    numbers = range(2, 10)
    return [
        Step("square", lambda n: n * n, "n=n**2", "n=n^2"),
        Step("halve", lambda n: n // 2, "n=n//2", "n=n/2"),
        Step("sum to", lambda n: sum(range(n + 1)), "n=sum(range(n+1))", "n=sum(range(n))"),
        Step("digits", lambda n: len(str(n)), "n=len(str(n))", "n=len(n)"),
        Step("double", lambda n: n * 2, "n=n*2"),
        *(Step(f"add {k}", lambda n, k=k: n + k, f"n=n+{k}") for k in numbers),  # type: ignore[misc]
        *(Step(f"times {k}", lambda n, k=k: n * k, f"n=n*{k}") for k in numbers),  # type: ignore[misc]
        Step("last digit", lambda n: n % 10, "n=n%10", "n=n/10"),
        Step("next", lambda n: n + 1, "n=n+1"),
        Step("cube", lambda n: n**3, "n=n**3", "n=n^3"),
    ]


def prompt_of(first: Step, second: Step) -> str:
    return f"{first.words}, {second.words}:"


def program_of(first: str, second: str) -> str:
    """A program of two statements."""
    return f"n=int(input())\n{first}\n{second}\nprint(n)"


@gin.configurable(module="code")
def programs(split: Literal["train", "test"] = "train", seed: int = 0) -> list[Task]:
    """Returns one task for each pair of steps: 100 pairs that are the same for every seed, or the
    others.

    Args:
        split: "train" or "test".
        seed: Seed of the inputs of the tests.
    """
    one_of("code.programs.split", split, ("train", "test"))
    pairs = list(product(all_steps(), repeat=2))
    Random("held out").shuffle(pairs)
    random = Random(f"inputs {seed}")
    chosen = pairs[:HELD_OUT] if split == "test" else pairs[HELD_OUT:]
    return [task_of(*pair, random.sample(range(2, LARGEST + 1), INPUTS)) for pair in chosen]


def task_of(first: Step, second: Step, inputs: list[int]) -> Task:
    """The task of a program, with a test for each input."""
    tests = [{"input": f"{n}\n", "output": f"{second.compute(first.compute(n))}\n"} for n in inputs]
    prompt = prompt_of(first, second)
    return Task(prompt, prompt, {"tests": tests})
