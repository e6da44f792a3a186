"""The initial model of the example: fine-tuned on solutions that only add and subtract, made once
and cached.

If sums and differences do not reach the target, the demonstration is an arbitrary expression of the
same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from random import Random

import gin

from areal_x import Batch, Trajectory
from examples.countdown import task as task_module
from examples.countdown.task import Problem, combined, drawn_problems
from examples.tiny.model import encode, write_model
from examples.tiny.supervised import batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model

PIECES = "0123456789+-*/()=,:?"
NUMBERS, LARGEST, HIGHEST = (3,), 9, 99  # as in tiny.gin
ROW_LENGTH = 80
ASKED = "?"  # the prompt that requests a problem
DEMONSTRATIONS = 200  # generated per step


@gin.configurable(module="countdown")
def warm_start(
    seed: int = 0,
    steps: int = 350,
    learning_rate: float = 2e-3,
    proposals: float = 0.0,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        proposals: Share of the demonstrations that answer "?" with a problem, which
            examples/self_play needs.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "countdown",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "proposals": proposals},
        write=lambda directory: write_model(directory, PIECES, seed),
        batches=lambda _: batches(steps, seed, proposals),
        code=[task_module, sys.modules[__name__]],
        backend=backend,
        share="proposals",
    )


def batches(steps: int, seed: int, proposals: float = 0.0) -> Iterator[Batch]:
    """Yields batches of demonstrations, sampled one by one."""
    random = Random(f"demonstrations {seed}")
    problems = islice(drawn_problems(random, NUMBERS, LARGEST, HIGHEST), DEMONSTRATIONS * steps)
    shown = [
        demonstration(problem, random, proposed=random.random() < proposals) for problem in problems
    ]
    return batches_of(shown, steps, ROW_LENGTH, seed)


def demonstration(problem: Problem, random: Random, proposed: bool) -> Trajectory:
    """A trajectory that proposes the problem, or one that answers it."""
    asked, said = (ASKED, problem.short) if proposed else (problem.short, answer(problem, random))
    return supervised_trajectory(
        (encode(PIECES, asked), False), (encode(PIECES, f"{said}<end>"), True)
    )


def answer(problem: Problem, random: Random) -> str:
    """The solution if it uses only sums and differences, otherwise an arbitrary expression of the
    same numbers."""
    if not set("*/") & set(problem.expression):
        return problem.expression
    while not (expression := combined(random, problem.numbers, HIGHEST)[1]):
        pass
    return expression
