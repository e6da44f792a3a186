"""An endless, resumable stream of tasks over a dataset, whose whole state is its position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from areal_x.errors import UserError, at_least
from areal_x.types import Task

# Most tasks that a dataset's digest reads: a long dataset need not be in memory.
MAX_DIGESTED_TASKS = 10_000


class TaskStream:
    """Yields every task once an epoch, in an order that depends on (seed, epoch) alone, or in the
    dataset's order if shuffle=False.

    position: tasks taken so far; assign it to continue from there.

    Raises: UserError for an empty dataset, ConfigError for a seed below 0.
    """

    def __init__(self, dataset: Sequence[Task], seed: int = 0, shuffle: bool = True) -> None:
        if len(dataset) == 0:
            raise UserError("train.dataset has no tasks: give it at least one")
        at_least("train.seed", seed, 0)
        self.dataset = dataset
        self.position = 0

        @lru_cache(maxsize=2)  # a resumed run reissues tasks of the epoch before
        def order(epoch: int) -> Int64[np.ndarray, " tasks"]:
            return (
                np.random.default_rng([seed, epoch]).permutation(len(dataset))
                if shuffle
                else np.arange(len(dataset))
            )

        self._order = order

    def next(self) -> tuple[int, Task]:
        """Returns the next task and its position."""
        position = self.position
        self.position += 1
        return position, self.task_at(position)

    def task_at(self, position: int) -> Task:
        """The task at a position, the same for every stream of this dataset and seed."""
        return self.dataset[self.index_at(position)]

    def index_at(self, position: int) -> int:
        """The index in the dataset of the task at a position."""
        epoch, place = divmod(position, len(self.dataset))
        return int(self._order(epoch)[place])


def dataset_digest(dataset: Sequence[Task]) -> str:
    """SHA-256 of the tasks in their order, the same in every process. In a long dataset, tasks at
    equal distances are sampled."""
    digest = hashlib.sha256()
    for index in (
        np.unique(np.linspace(0, len(dataset) - 1, MAX_DIGESTED_TASKS).astype(int))
        if len(dataset)
        else ()
    ):
        task = dataset[int(index)]
        about = [getattr(task, name, None) for name in ("id", "prompt", "answer")]
        # Values that JSON cannot express may print differently in each process: only their type
        # counts.
        digest.update(
            json.dumps(about, default=lambda x: type(x).__qualname__, skipkeys=True).encode()
        )
    return digest.hexdigest()
