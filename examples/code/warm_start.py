"""The initial model of the example: fine-tuned on programs of which most have a typical mistake where
one is possible, made once and cached."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from random import Random

import gin

from areal_x import Batch, Trajectory
from examples.code import task as task_module
from examples.code.task import Step, all_steps, program_of, prompt_of
from examples.tiny.model import encode, write_model
from examples.tiny.supervised import batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model

BEGIN, END = "n=int(input())\n", "\nprint(n)"
WORDS = tuple(sorted({step.words.rstrip("23456789 ") for step in all_steps()}))
NAMES = ("sum", "range", "len", "str")
PIECES = (*"0123456789+-*/%^()=n,: ", "\n", BEGIN, END, *WORDS, *NAMES)
ROW_LENGTH = 80
DEMONSTRATIONS = 80  # generated per step


@gin.configurable(module="code")
def warm_start(
    seed: int = 0,
    steps: int = 200,
    learning_rate: float = 2e-3,
    mistakes: float = 0.7,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        mistakes: Share of the steps with a typical mistake that are demonstrated with it.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "code",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "mistakes": mistakes},
        write=lambda directory: write_model(directory, PIECES, seed),
        batches=lambda _: batches(steps, seed, mistakes),
        code=[task_module, sys.modules[__name__]],
        backend=backend,
        share="mistakes",
    )


def batches(count: int, seed: int, mistakes: float) -> Iterator[Batch]:
    """Yields batches of demonstrations of random pairs of steps, held-out ones included: what they
    teach about those is mostly wrong, too."""
    random = Random(f"demonstrations {seed}")
    shown = [demonstration(random, mistakes) for _ in range(DEMONSTRATIONS * count)]
    return batches_of(shown, count, ROW_LENGTH, seed)


def demonstration(random: Random, mistakes: float) -> Trajectory:
    """A program for a random pair of steps."""
    first, second = random.choice(all_steps()), random.choice(all_steps())
    program = program_of(written(first, random, mistakes), written(second, random, mistakes))
    return supervised_trajectory(
        (encode(PIECES, prompt_of(first, second)), False),
        (encode(PIECES, f"{program}<end>"), True),
    )


def written(step: Step, random: Random, mistakes: float) -> str:
    """The statement of a step, with its typical mistake in this share of the cases."""
    return step.mistake if step.mistake and random.random() < mistakes else step.code
