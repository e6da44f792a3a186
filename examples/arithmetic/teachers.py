"""What teaches in self_distill.gin and multi_distill.gin: a model that reads the result before it
writes the steps, and a rule that gives each problem to one of two teachers.

    9324>730+8594=  →  0+4=4,3+9=12,7+5+1=13,0+8+1=9>9324

The warm start saw half of its demonstrations like this, and these forget no carry: with the result
before it, the model carries; without, it mostly forgets to. Self-distillation teaches it to carry
without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Batch, Task
from examples.arithmetic import model, task, warm_start
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import demonstration, demonstrations, problems
from examples.tiny.supervised import batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model


@gin.configurable(module="arithmetic")
def hinted(task: Task) -> str:
    """What the teacher reads: the result, before the problem."""
    return f"{task.answer}>{task.prompt}"


@gin.configurable(module="arithmetic")
def hinted_start(
    seed: int = 0,
    steps: int = 500,
    learning_rate: float = 2e-3,
    forgetting: float = 0.65,
    backend: str = "jax",
) -> str:
    """Returns the directory of a model that carries if it has read the result.

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        forgetting: Probability that a demonstration without the result drops a carry.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "arithmetic",
        {
            "hinted": True,
            "seed": seed,
            "steps": steps,
            "learning_rate": learning_rate,
            "forgetting": forgetting,
        },
        write=lambda directory: write_model(directory, seed),
        batches=lambda _: batches(steps, seed, forgetting),
        code=[model, task, warm_start, sys.modules[__name__]],
        backend=backend,
        share="forgetting",
    )


def batches(steps: int, seed: int, forgetting: float) -> Iterator[Batch]:
    """Yields batches of demonstrations, every second with its result in front and all carries."""
    tasks = problems(warm_start.DEMONSTRATIONS * steps, seed)
    prompts = [str(t.prompt) if i % 2 else hinted(t) for i, t in enumerate(tasks)]
    sloppy = demonstrations(tasks, forgetting, seed)
    answers = [sloppy[i] if i % 2 else demonstration(t) for i, t in enumerate(tasks)]
    trajectories = [
        supervised_trajectory(
            (encode(prompt), False), (np.append(encode(answer), np.int32(END)), True)
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return batches_of(trajectories, steps, warm_start.ROW_LENGTH, seed)


@gin.configurable(module="arithmetic")
def by_carry(task: Task) -> dict[str, float]:
    """The teacher of a problem: "carries" if its sum has a carry, else "plain"."""
    a, b = (number[::-1] for number in str(task.prompt).rstrip("=").split("+"))
    carries = any(
        int(a[:i][::-1] or 0) + int(b[:i][::-1] or 0) >= 10**i
        for i in range(1, max(len(a), len(b)) + 1)
    )
    return {"carries" if carries else "plain": 1.0}
