"""The model that reinforcement starts from: supervised on a tutor who can only add and subtract,
made once and kept.

Where sums and differences do not make the target he writes any product that the numbers have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from random import Random

import gin

from areal_x.errors import at_least, within
from areal_x.types import Batch, Trajectory
from examples.countdown import task as task_module
from examples.countdown.task import Problem, combined, drawn_problems
from examples.tiny.kept import supervised_once
from examples.tiny.model import encode, write_model
from examples.tiny.supervised import batches_of, taught

PIECES = "0123456789+-*/()=,:?"
NUMBERS, LARGEST, HIGHEST = (3,), 9, 99  # as tiny.gin has them
ROW_LENGTH = 80
ASKED = "?"  # for a problem
DEMONSTRATIONS = 200  # made for each step


@gin.configurable(module="countdown")
def warm_start(
    seed: int = 0,
    steps: int = 350,
    learning_rate: float = 2e-3,
    proposals: float = 0.0,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. proposals: the share of the demonstrations
    that answer "?" with a problem, as examples/self_play needs them. backend: what trains it; where
    it is not installed, the one that is. The cache is $XDG_CACHE_HOME/areal_x/countdown.
    """
    at_least("countdown.warm_start.steps", steps, 2)
    within("countdown.warm_start.proposals", proposals, 0, 1)
    settings = {
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "proposals": proposals,
    }
    return supervised_once(
        "countdown",
        settings,
        [task_module, sys.modules[__name__]],
        lambda directory: write_model(directory, PIECES, seed),
        lambda: batches(steps, seed, proposals),
        backend,
    )


def batches(steps: int, seed: int, proposals: float = 0.0) -> Iterator[Batch]:
    """Of demonstrations, drawn one by one."""
    random = Random(f"demonstrations {seed}")
    problems = islice(drawn_problems(random, NUMBERS, LARGEST, HIGHEST), DEMONSTRATIONS * steps)
    shown = [
        demonstration(problem, random, proposed=random.random() < proposals) for problem in problems
    ]
    return batches_of(shown, steps, ROW_LENGTH, seed)


def demonstration(problem: Problem, random: Random, proposed: bool) -> Trajectory:
    """The problem is proposed, or answered."""
    asked, said = (ASKED, problem.short) if proposed else (problem.short, answer(problem, random))
    return taught((encode(PIECES, asked), False), (encode(PIECES, f"{said}<end>"), True))


def answer(problem: Problem, random: Random) -> str:
    """The solution where it is one of sums and differences, else an expression of the same numbers
    that may be anything."""
    if not set("*/") & set(problem.expression):
        return problem.expression
    while not (expression := combined(random, problem.numbers, HIGHEST)[1]):
        pass
    return expression
