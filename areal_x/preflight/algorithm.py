"""Checks that the parts of an algorithm, including a user's own, compute what a training step needs.

The batch is made as in a run (areal_x.batching.batch), but from made-up groups of a few tokens, and
with random numbers in place of the models' log-probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.validation import missing_inputs
from areal_x.batching.batch import Models, make_batches
from areal_x.batching.teachers import Reader, weights_of
from areal_x.errors import UserError, function_name
from areal_x.protocols.backends import Backend, load_backend
from areal_x.types import Batch, Episode, Group, Loss, Policy, Scored, Task, Trajectory

PROMPT, ANSWER, ROW = 2, 5, 24  # tokens
SPREAD = 0.3  # nats, standard deviation between two models' log-probabilities of a token


class RandomModel:
    """Stands in for a trainer: random values, and log-probabilities near those of the behavior
    policy."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def logprobs(self, batch: Batch) -> np.ndarray:
        logp = np.asarray(batch.behavior_logp) + self._random.normal(0, SPREAD, batch.shape)
        return np.where(batch.mask, logp, 0).astype(np.float32)

    def values(self, batch: Batch) -> np.ndarray:
        return np.where(batch.mask, self._random.normal(size=batch.shape), 0).astype(np.float32)


class Undecoded:
    """A tokenizer for the examples' ids, which are no text."""

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        return " ".join(map(str, ids))


def check_algorithm(
    algorithm: Algorithm,
    backend: str,
    group_size: int,
    tasks: Sequence[Task] = (),
    minibatches: int = 1,
    teachers: Collection[str] = (),
) -> str:
    """Makes a batch with the algorithm and differentiates its losses. tasks: some of the run's own,
    for filters and teachers that read them. minibatches: optimizer steps per batch of the run.
    teachers: the names of several.

    Raises: UserError for a part whose result has the wrong shape, and for a loss that is not
    (terms, metrics), is not 0 where masked out, is not finite, or has no gradient. Also raises
    whatever a user's part raises.
    """
    groups = example_groups(algorithm, group_size, tasks)
    not_bool = [
        function_name(keep)
        for keep in algorithm.filters
        for group in groups
        if not isinstance(keep(group), bool | np.bool_)
    ]
    if not_bool:
        raise UserError(
            f"the filter {not_bool[0]} did not return a bool: it must return whether to train on a"
            " group"
        )
    missing = missing_inputs(algorithm)
    models = Models(
        policy=RandomModel(0),  # type: ignore[arg-type]  # no other method of a trainer is called
        reference_servers=None if "reference_logp" in missing else RandomModel(1),
        teacher_servers={name: RandomModel(1) for name in teachers},
        reader=Reader(Undecoded(), lambda prompt: np.arange(PROMPT, dtype=np.int32)),
        critic=None if "old_values" in missing else RandomModel(2),  # type: ignore[arg-type]
    )
    own_pass = algorithm.uses_own_pass(minibatches)
    (batch,) = make_batches(groups, algorithm, ROW, models, version=1, own_pass=own_pass)
    loaded = load_backend(backend)
    check_loss(algorithm.step_loss(own_pass), example_policy(batch, missing), batch, loaded)
    if algorithm.value_loss is not None:
        values = RandomModel(3).values(batch)
        check_loss(algorithm.value_loss, Policy(values=values), batch, loaded)
    return f"{algorithm.name}: its parts fit together and its loss has a gradient"


def check_teachers(algorithm: Algorithm, teachers: Collection[str], tasks: Sequence[Task]) -> str:
    """Looks up the teachers of all tasks. Raises: UserError for a task whose teacher is not there."""
    count = dict.fromkeys(teachers, 0)
    for task in tasks:
        for name in weights_of(algorithm, task, teachers):
            count[name] += 1
    return "; ".join(f"{name} teaches {n} of {len(tasks)} tasks" for name, n in count.items())


def check_loss(loss: Loss, policy: Policy, batch: Batch, backend: Backend) -> None:
    """Raises: UserError as `check_algorithm` for a loss."""
    name = function_name(loss)
    terms, gradient = backend.differentiate(loss, policy, batch)
    if np.any(terms[~np.asarray(batch.mask)] != 0):
        wanted = "mask its inputs with areal_x.algorithms.arrays.masked"
        raise UserError(f"the loss {name} is not 0 where batch.mask is False: {wanted}")
    slopes = [slope for f in fields(Policy) if (slope := getattr(gradient, f.name)) is not None]
    if not all(np.isfinite(x).all() for x in (terms, *slopes)):
        raise UserError(
            f"the loss {name} or its gradient is not finite: mask its inputs before any arithmetic"
        )
    if not any(slope.any() for slope in slopes):
        read = ", ".join(
            f"policy.{f.name}" for f in fields(Policy) if getattr(policy, f.name) is not None
        )
        raise UserError(
            f"the loss {name} has no gradient with respect to {read}: nothing would be learnt"
        )


def example_groups(
    algorithm: Algorithm, group_size: int, tasks: Sequence[Task] = ()
) -> list[Group]:
    """Groups of three tasks whose episodes differ in reward and in length; pairs if the algorithm
    compares pairs."""
    random = np.random.default_rng(0)

    def trajectory(answer: int, reward: float) -> Trajectory:
        logp = random.uniform(-2, -0.1, answer).astype(np.float32)
        return Trajectory.from_completion(
            np.arange(PROMPT, dtype=np.int32),
            np.arange(answer, dtype=np.int32),
            logp,
            np.zeros(answer, np.int32),
            reward=reward,
        )

    def episode(i: int) -> Episode:
        reward, count = float(i % 2), 2 if algorithm.pairs else 1
        return Episode(
            Scored(reward),
            tuple(trajectory(2 + (i + j) % (ANSWER - 1), reward) for j in range(count)),
        )

    given = list(tasks) or [Task(str(g), "") for g in range(3)]
    first = [given[g % len(given)] for g in range(3)]
    groups = [
        Group(task, g, 0, tuple(episode(g + i) for i in range(group_size)))
        for g, task in enumerate(first)
    ]
    if "greedy" in algorithm.needs:
        return [replace(group, greedy_reward=0.5) for group in groups]
    return groups


def example_policy(batch: Batch, missing: Collection[str]) -> Policy:
    """A policy slightly different from the one that sampled, without the arrays that the algorithm
    does not provide."""
    if "logp" in missing:
        return Policy(values=RandomModel(4).values(batch))
    positive = np.random.default_rng(5).uniform(0.1, 2, batch.shape)
    positive = np.where(batch.mask, positive, 0).astype(np.float32)
    return Policy(
        logp=RandomModel(6).logprobs(batch),
        entropy=None if "entropy" in missing else positive,
        divergence=None if "divergence" in missing else positive,
    )
