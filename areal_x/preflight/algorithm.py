"""Whether the parts of an algorithm, a user's own among them, give what a training step needs.

The step is the run's own (areal_x.batching.batch) but for the models: a few tokens of made-up
groups, whose log-probabilities are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.validation import missing_inputs
from areal_x.batching.batch import Models, make_batches
from areal_x.errors import UserError, function_name
from areal_x.protocols.backends import Backend, load_backend
from areal_x.types import Batch, Episode, Group, Loss, Policy, Scored, Task, Trajectory

PROMPT, ANSWER, ROW = 2, 5, 24  # tokens
APART = 0.3  # nats, the spread of what two models say of a token


class Drawn:
    """In the place of a trainer: log-probabilities and values near those that were sampled with."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def logprobs(self, batch: Batch) -> np.ndarray:
        drawn = np.asarray(batch.behavior_logp) + self._random.normal(0, APART, batch.shape)
        return np.where(batch.mask, drawn, 0).astype(np.float32)

    def values(self, batch: Batch) -> np.ndarray:
        return np.where(batch.mask, self._random.normal(size=batch.shape), 0).astype(np.float32)


def trains(algorithm: Algorithm, backend: str, group_size: int, tasks: Sequence[Task] = ()) -> str:
    """What is found where all is well. tasks: some of the run's own, which a filter may look into.

    Raises: UserError for a part whose result has another shape than it must have, for a loss that
    is not (terms, metrics), is not 0 where nothing is trained on, is not finite, or has no
    gradient; whatever a user's part raises.
    """
    groups = groups_of(algorithm, group_size, tasks)
    refused = [
        function_name(keep)
        for keep in algorithm.filters
        for group in groups
        if not isinstance(keep(group), bool | np.bool_)
    ]
    if refused:
        raise UserError(
            f"the filter {refused[0]} gave no bool: it must say of a group whether it is trained on"
        )
    without = missing_inputs(algorithm)
    models = Models(
        policy=Drawn(0),  # type: ignore[arg-type]  # nothing else of a trainer is asked here
        reference_servers=None if "reference_logp" in without else Drawn(1),
        critic=None if "old_values" in without else Drawn(2),  # type: ignore[arg-type]
    )
    (batch,) = make_batches(groups, algorithm, ROW, models, version=1)
    computes = load_backend(backend)
    learns(algorithm.step_loss(), policy_of(batch, without), batch, computes)
    if algorithm.value_loss is not None:
        learns(algorithm.value_loss, Policy(values=Drawn(3).values(batch)), batch, computes)
    return f"{algorithm.name}: its parts fit together and its loss has a gradient"


def learns(loss: Loss, policy: Policy, batch: Batch, backend: Backend) -> None:
    """Raises: see `trains`."""
    name = function_name(loss)
    terms, gradient = backend.differentiate(loss, policy, batch)
    if np.any(terms[~np.asarray(batch.mask)] != 0):
        wanted = "mask what it reads, with areal_x.algorithms.arrays.masked"
        raise UserError(f"the loss {name} is not 0 where batch.mask is False: {wanted}")
    slopes = [slope for f in fields(Policy) if (slope := getattr(gradient, f.name)) is not None]
    if not all(np.isfinite(x).all() for x in (terms, *slopes)):
        raise UserError(
            f"the loss {name} or its gradient is not finite: mask what it reads before any"
            " arithmetic"
        )
    if not any(slope.any() for slope in slopes):
        read = ", ".join(
            f"policy.{f.name}" for f in fields(Policy) if getattr(policy, f.name) is not None
        )
        raise UserError(f"the loss {name} has no gradient by {read}: nothing would be learnt")


def groups_of(algorithm: Algorithm, group_size: int, tasks: Sequence[Task] = ()) -> list[Group]:
    """Three tasks whose episodes differ in reward and in length; pairs where the algorithm compares
    those."""
    random = np.random.default_rng(0)

    def trajectory(answer: int, reward: float) -> Trajectory:
        logp = random.uniform(-2, -0.1, answer).astype(np.float32)
        return Trajectory.from_completion(
            np.arange(PROMPT, dtype=np.int32),
            np.arange(answer, dtype=np.int32),
            logp,
            np.zeros(answer, np.int32),
            reward,
        )

    def episode(i: int) -> Episode:
        reward, count = float(i % 2), 2 if algorithm.pairs else 1
        return Episode(
            Scored(reward),
            tuple(trajectory(2 + (i + j) % (ANSWER - 1), reward) for j in range(count)),
        )

    asked = [*tasks, *(Task(str(g), "") for g in range(3))][:3]
    made = [
        Group(task, g, 0, tuple(episode(g + i) for i in range(group_size)))
        for g, task in enumerate(asked)
    ]
    return (
        [replace(group, greedy_reward=0.5) for group in made]
        if "greedy" in algorithm.needs
        else made
    )


def policy_of(batch: Batch, without: Collection[str]) -> Policy:
    """What the loss of an algorithm that does without these arrays is given, a little apart from
    the policy that sampled."""
    if "logp" in without:
        return Policy(values=Drawn(4).values(batch))
    shown = np.where(batch.mask, np.random.default_rng(5).uniform(0.1, 2, batch.shape), 0).astype(
        np.float32
    )
    return Policy(
        logp=Drawn(6).logprobs(batch),
        entropy=None if "entropy" in without else shown,
        divergence=None if "divergence" in without else shown,
    )
