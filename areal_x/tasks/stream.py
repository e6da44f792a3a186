"""An endless, resumable stream of tasks over a dataset, whose whole state is its position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from areal_x.errors import UserError, at_least
from areal_x.types import Task


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
