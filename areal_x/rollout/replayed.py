"""A replayed rollout: the groups that a recorded run consumed, in its order, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areal_x.protocols.trainer import Trainer
from areal_x.rollout.rollout import Published
from areal_x.rollout.runner import RolloutStats
from areal_x.run.journal import Journal, TaskAt
from areal_x.types import Group


class ReplayedRollout:
    """Stands in for a `Rollout` and returns the recorded groups of one step after another."""

    def __init__(
        self, recorded: Journal, steps: Sequence[int], task_at: TaskAt | None = None
    ) -> None:
        """task_at: returns the task at a position; without it, tasks have only an id."""
        self._recorded = recorded
        self._task_at = task_at
        self._steps: Iterator[int] = iter(steps)

    def __enter__(self) -> ReplayedRollout:
        return self

    def __exit__(self, *error: object) -> None:
        self._recorded.__exit__(*error)

    def start(self, _: object = None) -> None: ...

    def publish(self, trainer: Trainer, version: int | None = None, wait: bool = True) -> Published:
        return Published(0.0, 0.0)

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        return {}

    def take(self) -> list[Group]:
        return self._recorded.groups_of(next(self._steps), self._task_at)

    def state(self) -> dict[str, int]:
        return {}

    def stats(self) -> RolloutStats:
        return RolloutStats()
