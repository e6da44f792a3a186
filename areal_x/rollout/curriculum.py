"""Curricula: tasks chosen by how often a model solved them, as a run's journal has it.

areal-x rollout FILE.gin --tasks 1000 -b "train.group_size = 8"     # writes runs/NAME
areal-x train FILE.gin -b "train.dataset = @curriculum()" -b "curriculum.run = 'runs/NAME'"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import gin

from areal_x.errors import ConfigError, UserError, within
from areal_x.run.journal import FILE, Journal
from areal_x.types import Scored, Task

UNSEEN = ("keep", "drop")


def pass_rates(run: Path, threshold: float = 1.0) -> dict[str, float]:
    """Returns the share of scored attempts whose reward is at least `threshold`, for each task in a
    run's journal, by its id.

    Raises: UserError if the run has no journal.
    """
    if not (run / FILE).is_file():
        raise UserError(f"{run} has no {FILE}: name the directory of a run, or of a rollout")
    solved: dict[str, list[bool]] = defaultdict(list)
    with Journal(run) as journal:
        for group in journal.groups():
            solved[group.task.id] += [
                e.outcome.reward >= threshold
                for e in group.episodes
                if isinstance(e.outcome, Scored)
            ]
    return {task: sum(found) / len(found) for task, found in solved.items() if found}


@gin.configurable
def curriculum(
    dataset: Sequence[Task],
    run: str,
    low: float = 0.0,
    high: float = 1.0,
    threshold: float = 1.0,
    unseen: str = "keep",
) -> list[Task]:
    """Returns the tasks of a dataset that a model solved neither too rarely nor too often, in their
    order: groups without variance train nothing, and cost as much as others.

    Args:
        dataset: The tasks to choose from.
        run: Directory of the run, or of the rollout, whose journal has attempts at them.
        low: Smallest share of solved attempts that is kept, from 0 to high.
        high: Largest share that is kept, at most 1.
        threshold: Reward from which an attempt counts as solved.
        unseen: "keep" or "drop" tasks without a scored attempt in the journal.

    Prints a sentence about the numbers of tasks.

    Raises: UserError if no task is left, or the run has no journal.
    """
    within("curriculum.low", low, 0, high)
    within("curriculum.high", high, 0, 1)
    if unseen not in UNSEEN:
        raise ConfigError("curriculum.unseen", unseen, "'keep' or 'drop'")
    rates = pass_rates(Path(run).expanduser(), threshold)
    kept = [
        task
        for task in dataset
        if (low <= rates[task.id] <= high if task.id in rates else unseen == "keep")
    ]
    seen = [rates[task.id] for task in dataset if task.id in rates]
    numbers = (
        f"of {len(dataset):,} tasks {len(seen):,} have attempts in {run}: {sum(r < low for r in seen):,}"
        f" are solved too rarely and {sum(r > high for r in seen):,} too often; {len(kept):,} are kept"
    )
    if not kept:
        raise UserError(f"no task is left by curriculum.low = {low} and high = {high}: {numbers}")
    print(numbers)
    return kept
