"""Named sets of tasks that a model is evaluated on, during a run (train.evaluations) or by
`areal-x evaluate`.

    train.evaluations = [@easy/evaluation_set(), @hard/evaluation_set()]
    easy/evaluation_set.name = "easy"
    easy/evaluation_set.dataset = @easy/load_dataset()
    hard/evaluation_set.name = "hard"
    hard/evaluation_set.dataset = @hard/load_dataset()
    evaluation_set.attempts = 8
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import gin

from areal_x.errors import ConfigError, positive
from areal_x.protocols.workflow import Workflow, check_workflow
from areal_x.types import Task

NAME = re.compile(r"[\w.-]+")  # it is part of metrics' names, which a slash would divide


@gin.configurable("evaluation_set")
@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Tasks that a model is evaluated on, and how."""

    name: str
    """Its name in metrics and tables: letters, digits, `_`, `-` and `.`."""

    dataset: Sequence[Task]
    """The tasks, of which none may be trained on."""

    workflow: Workflow | None = None
    """Workflow that attempts and scores the tasks; None uses train.evaluation, or train.workflow."""

    attempts: int = 1
    """Attempts at each task."""

    greedy: bool | None = None
    """True decodes greedily, False samples as the workflow does. None is greedy for a single attempt
    and samples several."""

    threshold: float = 1.0
    """Reward from which an attempt counts as solved, for pass@k."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                "evaluation_set.name", self.name, "of letters, digits, '_', '-' and '.'"
            )
        positive("evaluation_set.attempts", self.attempts)
        if self.greedy and self.attempts > 1:
            wanted = "1 with evaluation_set.greedy = True: greedy attempts are all the same"
            raise ConfigError("evaluation_set.attempts", self.attempts, wanted)
        if self.workflow is not None:
            check_workflow("evaluation_set.workflow", self.workflow)

    @property
    def is_greedy(self) -> bool:
        return self.attempts == 1 if self.greedy is None else self.greedy


def check_names(sets: Sequence[EvaluationSet]) -> None:
    """Raises: ConfigError if two sets have one name, or a set has no task."""
    for number, one in enumerate(sets):
        if one.name in [other.name for other in sets[:number]]:
            raise ConfigError("evaluation_set.name", one.name, "a name that no other set has")
        if not len(one.dataset):
            wanted = f"at least one task (of the set {one.name!r})"
            raise ConfigError("evaluation_set.dataset", "no tasks", wanted)
