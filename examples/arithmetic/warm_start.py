"""The model that reinforcement starts from: supervised on a sloppy tutor's answers, made once and
kept.

It writes steps well and forgets most carries, so that greedily it solves just the problems without
any: 31 % of the held-out ones. That is what reinforcement has to mend. What it hardly mends is the
quality of the steps: the share of held-out problems that the model would solve if each carry were
written for it is, within 4 points, where seven runs of reinforcement ended. That share is 95 to 96
% here (seeds 0, 1, 2); a learning rate of 4e-3 with 3 carries of 4 forgotten gave 94 and 88 %
(seeds 0, 1). The initial weights matter as much: see `spread` in examples/tiny/model.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x.errors import at_least, within
from areal_x.types import Batch, Trajectory
from examples.arithmetic import model, task
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import demonstrations, problems
from examples.tiny.kept import supervised_once
from examples.tiny.supervised import batches_of, taught

ROW_LENGTH = 80  # of 56 to 128 the shortest that demonstrations fill to 97 %: 62 of them a step
DEMONSTRATIONS = 65  # made for each step, of which a few are left over


@gin.configurable(module="arithmetic")
def warm_start(
    seed: int = 0,
    steps: int = 350,
    learning_rate: float = 2e-3,
    forgetting: float = 0.65,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. forgetting: the probability that a
    demonstration drops a carry. backend: what trains it; where it is not installed, the one that
    is. The cache is $XDG_CACHE_HOME/areal_x/arithmetic.
    """
    at_least("arithmetic.warm_start.steps", steps, 2)
    within("arithmetic.warm_start.forgetting", forgetting, 0, 1)
    settings = {
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "forgetting": forgetting,
    }
    return supervised_once(
        "arithmetic",
        settings,
        [model, task, sys.modules[__name__]],
        lambda directory: write_model(directory, seed),
        lambda: batches(steps, seed, forgetting),
        backend,
    )


def batches(steps: int, seed: int, forgetting: float) -> Iterator[Batch]:
    """Of demonstrations, each seen at most once."""
    tasks = problems(DEMONSTRATIONS * steps, seed)
    answers = demonstrations(tasks, forgetting, seed)
    trajectories = [
        _trajectory(str(task.prompt), answer) for task, answer in zip(tasks, answers, strict=True)
    ]
    return batches_of(trajectories, steps, ROW_LENGTH, seed)


def _trajectory(prompt: str, answer: str) -> Trajectory:
    """A demonstration as a trajectory: trained on from the answer's first character to the end
    token."""
    return taught((encode(prompt), False), (np.append(encode(answer), np.int32(END)), True))
