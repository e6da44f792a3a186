"""Weighted mixtures of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import gin
import numpy as np

from areal_x.errors import ConfigError, UserError, positive
from areal_x.types import Task


@gin.configurable
@dataclass(frozen=True, kw_only=True)
class mixture(Sequence[Task]):
    """Several datasets as one, in which each has its share of the tasks.

    A dataset that is smaller than its share is repeated, the others are passed through evenly: epochs
    of a run, in which each task of the mixture is drawn once, then have exactly these shares. A task
    becomes "name/id", and its dataset's name the metadata `source`, so that rewards can be told apart.
    """

    datasets: Sequence[Sequence[Task]]
    """The datasets; none may be empty."""

    names: Sequence[str]
    """A name for each."""

    weights: Sequence[float] | None = None
    """The share of each, in any unit; None takes their sizes."""

    size: int | None = None
    """Number of tasks of the mixture; None takes as many as the datasets have together."""

    def __post_init__(self) -> None:
        number = len(self.datasets)
        if not number or any(len(dataset) == 0 for dataset in self.datasets):
            raise UserError("mixture.datasets must have at least one dataset, and each a task")
        if len(self.names) != number or len(set(self.names)) != number:
            wanted = f"{number} different names, one for each dataset"
            raise ConfigError("mixture.names", self.names, wanted)
        if self.weights is not None:
            if len(self.weights) != number:
                raise ConfigError("mixture.weights", self.weights, f"{number} numbers")
            for weight in self.weights:
                positive("mixture.weights", weight)
        if self.size is not None:
            positive("mixture.size", self.size)

    def __len__(self) -> int:
        return sum(map(len, self.datasets)) if self.size is None else self.size

    def counts(self) -> list[int]:
        """Returns the number of tasks of each dataset: shares of the size, rounded by the method of
        largest remainders."""
        weights = [len(d) for d in self.datasets] if self.weights is None else self.weights
        exact = np.asarray(weights, np.float64) / sum(weights) * len(self)
        counts = np.floor(exact + 1e-9).astype(np.int64)
        by_remainder = np.argsort(counts - exact, kind="stable")
        counts[by_remainder[: len(self) - int(counts.sum())]] += 1
        return [int(count) for count in counts]

    def __getitem__(self, index: int) -> Task:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place = index % len(self)
        for name, dataset, count in zip(self.names, self.datasets, self.counts(), strict=True):
            if place < count:
                # fewer than it has: spread over the whole dataset and not its beginning
                own = (
                    place * len(dataset) // count if count < len(dataset) else place % len(dataset)
                )
                task = dataset[own]
                metadata = {**task.metadata, "source": name}
                return replace(task, id=f"{name}/{task.id}", metadata=metadata)
            place -= count
        raise AssertionError("the counts add up to the size")
