"""Evaluates the newest published weights of a run: its held-out tasks, and its named sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.batching.batch import Models, make_batches
from areal_x.evaluation.evaluation_set import EvaluationSet
from areal_x.evaluation.results import SetResult, result_of
from areal_x.monitor.step_metrics import evaluate_held_out
from areal_x.protocols.workflow import Workflow
from areal_x.rollout.rollout import Rollout
from areal_x.runtime import timeline
from areal_x.types import Episode, Group, Task


def held_out_metrics(
    tasks: Sequence[Task],
    rollout: Rollout,
    models: Models,
    algorithm: Algorithm,
    row_length: int,
    generates: bool,
) -> dict[str, float]:
    """Returns the mean reward of greedy answers to held-out tasks; without an engine, the loss and
    its metrics on their demonstrations. generates: False without an engine."""
    if not tasks:
        return {}
    with timeline.span("evaluate", tasks=len(tasks)):
        episodes = rollout.evaluate(tasks)
    groups = [
        Group(task, ticket=i, admitted_version=0, episodes=(episode,))
        for i, (task, episode) in enumerate(zip(tasks, episodes, strict=True))
    ]
    rewards = [reward for group in groups for reward in group.rewards]
    failed = len(groups) - len(rewards)
    row = {"evaluation_failed": float(failed)} if failed else {}
    if not rewards:
        return row
    if generates:
        return row | {"accuracy": float(np.mean(rewards))}
    (batch,) = make_batches(groups, algorithm, row_length, models)
    return row | evaluate_held_out(batch, algorithm, models.policy)


def set_metrics(
    sets: Sequence[EvaluationSet], workflows: Mapping[str, Workflow], rollout: Rollout
) -> dict[str, float]:
    """Returns the metrics of all named sets."""
    row: dict[str, float] = {}
    for one in sets:
        row |= evaluate_set(one, workflows[one.name], rollout)[0].metrics()
    return row


def evaluate_set(
    one: EvaluationSet, workflow: Workflow, rollout: Rollout
) -> tuple[SetResult, list[Episode]]:
    """Attempts every task of a set under the newest published weights, as many at once as the engine
    has room for. Returns the result, and the episodes: all attempts at the first task, then those at
    the second.

    An attempt's samples depend on train.seed, its task's index and its number, so two models are
    compared on the same random numbers.
    """
    tasks = list(one.dataset)
    attempts = [task for task in tasks for _ in range(one.attempts)]
    with timeline.span("evaluate", set=one.name, tasks=len(tasks), attempts=one.attempts):
        episodes = rollout.evaluate(attempts, workflow)
    return result_of(one, tasks, episodes), episodes
