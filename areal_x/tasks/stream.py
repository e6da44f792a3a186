"""An endless, resumable walk over a dataset: position in, task out. The whole state is the
position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from areal_x.errors import UserError, at_least
from areal_x.types import Task

READ = 10_000  # tasks of a dataset that its digest is of, at most: a long one need not be in memory


class TaskStream:
    """Every task once an epoch, in an order that (seed, epoch) alone decides; with shuffle=False
    always the dataset's own.

    position: tasks drawn so far; set it to go on from there.
    Raises UserError for an empty dataset, ConfigError for a seed below 0.
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
        """The next task and the position it was drawn at."""
        position = self.position
        self.position += 1
        return position, self.task_at(position)

    def task_at(self, position: int) -> Task:
        """The task that any stream of this dataset and seed draws at this position."""
        return self.dataset[self.index_at(position)]

    def index_at(self, position: int) -> int:
        """Where that task is in the dataset."""
        epoch, place = divmod(position, len(self.dataset))
        return int(self._order(epoch)[place])


def digest_of(dataset: Sequence[Task]) -> str:
    """Of the tasks in their order, the same in every process; of a long dataset, of tasks at equal
    distances."""
    digest = hashlib.sha256()
    for index in (
        np.unique(np.linspace(0, len(dataset) - 1, READ).astype(int)) if len(dataset) else ()
    ):
        task = dataset[int(index)]
        about = [getattr(task, name, None) for name in ("id", "prompt", "answer")]
        # What has no form in JSON may look different in each process: its type alone counts.
        digest.update(
            json.dumps(about, default=lambda x: type(x).__qualname__, skipkeys=True).encode()
        )
    return digest.hexdigest()
