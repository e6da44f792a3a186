"""From scored groups to the packed rows of optimizer steps: rewards, advantages and weights, on the
host, in numpy.

groups ──split──▶ minibatches ──pack──▶ rows ──trainers──▶ log-probabilities, values
                                                                  │
batches ◀── weights × corrections ◀── advantages, returns ◀── rewards a token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.kl import k1
from areal_x.algorithms.parts import call_by_name, parameter_names
from areal_x.batching.packing import Packed, pack
from areal_x.errors import UserError, function_name
from areal_x.protocols.trainer import Scorer, Trainer
from areal_x.runtime import interrupts
from areal_x.types import NOT_THE_POLICY, Batch, Episode, Group, Trajectory


@dataclass(frozen=True)
class Models:
    """What gives a batch its log-probabilities and values; None where the algorithm does
    without."""

    policy: Trainer
    reference: Scorer | None = None
    critic: Trainer | None = None

    def trainers(self) -> dict[str, Trainer]:
        """Those that a backend computes, by name; a server may score in the place of the
        reference."""
        found: dict[str, Any] = {
            "policy": self.policy,
            "reference": self.reference,
            "critic": self.critic,
        }
        return {name: model for name, model in found.items() if hasattr(model, "restore")}

    def save(self, directory: Path) -> Callable[[], None] | None:
        """What `--resume` needs of the trainers; `trainer/` is a model directory. See
        Trainer.save_in_background."""
        begun = [self.policy.save_in_background(directory / "trainer")]
        if self.critic is not None:
            begun.append(self.critic.save_in_background(directory / "critic"))
        waits = [wait for wait in begun if wait is not None]

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all if waits else None


@dataclass(frozen=True)
class Part:
    """The episodes of one optimizer step and where their trajectories lie in its rows."""

    episodes: Sequence[Episode]
    tickets: Sequence[int]  # of the group of each episode
    # reward of the greedy answer to each episode's task, NaN where there is none
    greedy: Sequence[float]
    owner: Sequence[int]  # of each trajectory, its episode
    trajectories: Sequence[Trajectory]
    packed: Packed


def make_batches(
    groups: Sequence[Group],
    algorithm: Algorithm,
    row_length: int,
    models: Models,
    version: int = 0,
    minibatches: int = 1,
    share_prompts: bool = False,
) -> list[Batch]:
    """The rows `[rows, row_length]` of each of the `minibatches` optimizer steps over these groups,
    a group in one of them.

    Advantages are of all groups together; weights and corrections of one optimizer step each.
    version: of the policy now. share_prompts: what the trajectories of a group begin with lies once
    beside as many of them as a row holds. Raises: UserError for a trajectory longer than a row, or
    an episode that is no pair where the algorithm compares pairs.
    """
    together = 2 if algorithm.pairs else 1
    parts = [
        lay_out(groups[i::minibatches], row_length, together, share_prompts)
        for i in range(minibatches)
    ]
    batches = [with_models(part.packed.batch, algorithm, models, version) for part in parts]
    if algorithm.advantages is not None:
        batches = [
            credited(*both)
            for both in zip(with_advantages(batches, parts, algorithm), parts, strict=True)
        ]
    return [weighted(batch, part, algorithm) for batch, part in zip(batches, parts, strict=True)]


def lay_out(
    groups: Sequence[Group], row_length: int, together: int = 1, share_prompts: bool = False
) -> Part:
    """All scored episodes of the groups, packed; the `together` trajectories of an episode side by
    side."""
    episodes = [(episode, group) for group in groups for episode in group.scored]
    for episode, group in episodes:
        if together > 1 and len(episode.trajectories) != together:
            raise UserError(
                f"task {group.task.id!r} gave {len(episode.trajectories)} trajectories where the"
                f" algorithm compares {together}: it needs a workflow whose episodes are pairs,"
                " such as @preference_pairs()"
            )
    owned = [
        (trajectory, e)
        for e, (episode, _) in enumerate(episodes)
        for trajectory in episode.trajectories
    ]
    groups_of = [episodes[e][1].ticket for _, e in owned] if share_prompts else None
    return Part(
        episodes=[episode for episode, _ in episodes],
        tickets=[group.ticket for _, group in episodes],
        greedy=[
            np.nan if group.greedy_reward is None else group.greedy_reward for _, group in episodes
        ],
        owner=[e for _, e in owned],
        trajectories=[trajectory for trajectory, _ in owned],
        packed=pack(
            [trajectory for trajectory, _ in owned], row_length, together=together, groups=groups_of
        ),
    )


def with_models(batch: Batch, algorithm: Algorithm, models: Models, version: int) -> Batch:
    """The batch with every log-probability and value that the algorithm asks for."""
    interrupts.check()
    versions = np.asarray(batch.versions)
    ages = np.where(versions == NOT_THE_POLICY, 0, version - versions).astype(np.int32)
    batch = batch.replace(ages=ages)
    recomputed = models.policy.logprobs(batch) if algorithm.proximal == "recompute" else None
    return batch.replace(
        proximal_logp=batch.behavior_logp if recomputed is None else recomputed,
        reference_logp=None if models.reference is None else models.reference.logprobs(batch),
        old_values=None if models.critic is None else models.critic.values(batch),
    )


def with_advantages(
    batches: Sequence[Batch], parts: Sequence[Part], algorithm: Algorithm
) -> list[Batch]:
    """Advantages of all parts together, spread over the tokens; returns too, where the algorithm
    gives them."""
    function = algorithm.advantages
    assert function is not None
    rewards = [
        token_rewards(batch, part, algorithm) for batch, part in zip(batches, parts, strict=True)
    ]
    if "mask" in parameter_names(function):
        return per_token(function, batches, parts, rewards)
    owners = [np.asarray(part.owner, np.int64) for part in parts]
    count = [len(part.episodes) for part in parts]
    totals = [episode_rewards(part, own) for part, own in zip(parts, rewards, strict=True)]
    lengths = [
        np.bincount(owner, [t.mask.sum() for t in part.trajectories], n)
        for part, owner, n in zip(parts, owners, count, strict=True)
    ]
    given = {
        "rewards": np.concatenate(totals),
        "groups": np.concatenate([np.asarray(part.tickets, np.int64) for part in parts]),
        "lengths": np.concatenate(lengths),
        "greedy_rewards": np.concatenate([np.asarray(part.greedy, np.float64) for part in parts]),
    }
    of_episodes = shaped_as(given["rewards"], call_by_name(function, given), "advantages", function)
    advantages = np.split(of_episodes, np.cumsum(count)[:-1])
    return [
        batch.replace(advantages=part.packed.spread(own[owner]))
        for batch, part, own, owner in zip(batches, parts, advantages, owners, strict=True)
    ]


def episode_rewards(part: Part, rewards: Sequence[np.ndarray]) -> np.ndarray:
    """What each episode earned: the mean over its trajectories, which share its reward; without a
    trajectory its reward.

    An episode without a trained token was scored all the same, so the others of its group are
    compared with it.
    """
    totals = np.array([episode.reward for episode in part.episodes], np.float64)
    owner = np.asarray(part.owner, np.int64)
    has_any = np.bincount(owner, minlength=len(totals)) > 0
    return np.where(has_any, _mean_of_owner([r.sum() for r in rewards], owner, len(totals)), totals)


def credited(batch: Batch, part: Part) -> Batch:
    """Each token's advantage times what its trajectory says that it counts. A critic's targets stay
    as they are."""
    if all(trajectory.credit is None for trajectory in part.trajectories):
        return batch
    credit = [
        np.ones(len(t), np.float32) if t.credit is None else t.credit for t in part.trajectories
    ]
    return batch.replace(advantages=batch.advantages * part.packed.spread_tokens(credit))


def per_token(
    function: Callable[..., Any],
    batches: Sequence[Batch],
    parts: Sequence[Part],
    rewards: Sequence[Sequence[np.ndarray]],
) -> list[Batch]:
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    # An episode without a trajectory is a row of one token that is not trained on.
    bare = [
        (part.episodes[e].reward, part.tickets[e])
        for part in parts
        for e in without_trajectory(part)
    ]
    nothing = [np.zeros(1)] * len(bare)
    given = {
        "rewards": _rectangle(
            [*(r for own in rewards for r in own), *(np.array([reward]) for reward, _ in bare)],
            np.float64,
        ),
        "mask": _rectangle([*(t.mask for t in trajectories), *nothing], np.bool_),
        "groups": np.asarray(
            [part.tickets[owner] for part in parts for owner in part.owner]
            + [ticket for _, ticket in bare],
            np.int64,
        ),
    }
    if batches[0].old_values is not None:
        values = [
            v
            for batch, part in zip(batches, parts, strict=True)
            for v in part.packed.gather(np.asarray(batch.old_values))
        ]
        given["values"] = _rectangle([*values, *nothing], np.float64)
    result = call_by_name(function, given)
    named = {
        name: shaped_as(given["rewards"], x, name, function)
        for name, x in zip(
            ("advantages", "returns"),
            result if isinstance(result, tuple) else (result,),
            strict=False,
        )
    }
    made, first = [], 0
    for batch, part in zip(batches, parts, strict=True):
        rows = range(first, first + len(part.trajectories))
        first = rows.stop
        arrays = {
            name: part.packed.spread_tokens(
                [np.asarray(x)[r, : len(trajectories[r])] for r in rows]
            )
            for name, x in named.items()
        }
        made.append(batch.replace(**arrays))
    return made


def without_trajectory(part: Part) -> list[int]:
    return sorted(set(range(len(part.episodes))) - set(part.owner))


def token_rewards(batch: Batch, part: Part, algorithm: Algorithm) -> list[np.ndarray]:
    """What each token of each trajectory earned: the sequence's reward on its last trained token
    (so that an episode which ends in a tool's output does not lose it), token rewards of its own,
    what its length is worth, less β · k1 to the reference.

    Where no token is trained on the reward is the last one's: no gradient comes of it, and a
    baseline of the group counts it.
    """
    lengths = np.array([trajectory.mask.sum() for trajectory in part.trajectories])
    shaped = np.zeros(len(lengths))
    if algorithm.shaping is not None:
        shaped = shaped_as(shaped, algorithm.shaping(lengths), "shaping", algorithm.shaping).astype(
            np.float64
        )
    made = []
    for trajectory, owner, extra in zip(part.trajectories, part.owner, shaped, strict=True):
        earned = (
            np.zeros(len(trajectory))
            if trajectory.token_rewards is None
            else trajectory.token_rewards.astype(np.float64)
        )
        reward = part.episodes[owner].reward
        last = np.flatnonzero(trajectory.mask)[-1] if trajectory.mask.any() else -1
        earned[last] += reward + extra
        made.append(earned)
    if algorithm.reward_kl:
        kl = part.packed.gather(np.asarray(k1(batch.behavior_logp, batch.reference_logp)))
        made = [
            r - algorithm.reward_kl * np.where(t.mask, d, 0)
            for r, t, d in zip(made, part.trajectories, kl, strict=True)
        ]
    return made


def weighted(batch: Batch, part: Part, algorithm: Algorithm) -> Batch:
    """What each term counts. Denominators are those before any correction."""
    groups_of_segments = np.zeros((batch.shape[0], batch.shape[1] + 1), np.int64)
    groups_of_segments[part.packed.rows, part.packed.segments] = [
        part.tickets[owner] for owner in part.owner
    ]
    given = {
        "mask": batch.mask,
        "segment_ids": batch.segment_ids,
        "groups_of_segments": groups_of_segments,
    }
    weights = shaped_as(
        batch.mask, call_by_name(algorithm.weighting, given), "weighting", algorithm.weighting
    )
    if algorithm.corrections is not None and algorithm.proximal != "interpolate":
        log_ratio = np.where(
            batch.mask, np.asarray(batch.proximal_logp) - np.asarray(batch.behavior_logp), 0
        )
        factors = algorithm.corrections(log_ratio, batch.mask, batch.segment_ids)
        weights = weights * shaped_as(batch.mask, factors, "corrections", algorithm.corrections)
    return batch.replace(weights=weights.astype(np.float32))


def shaped_as(like: np.ndarray, given: Any, part: str, function: Callable[..., Any]) -> np.ndarray:
    """What a part of an algorithm gave, as an array. Raises: UserError where its shape is another
    than it must be."""
    array = given if isinstance(given, np.ndarray) else np.asarray(given)
    if array.shape != like.shape:
        name = function_name(function)
        raise UserError(
            f"{name} gave {part} of the shape {list(array.shape)}: it must be {list(like.shape)}"
        )
    return array


def staleness(groups: Sequence[Group], version: int) -> list[int]:
    """How many versions old each group is when version `version` is about to be trained: at most
    the queue's bound."""
    return [version - group.admitted_version for group in groups]


def _mean_of_owner(values: Sequence[float], owner: np.ndarray, count: int) -> np.ndarray:
    means: np.ndarray = np.bincount(owner, values, count) / np.maximum(
        np.bincount(owner, minlength=count), 1
    )
    return means


def _rectangle(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """`[S, T]`, T the longest, zeros behind the others' ends."""
    out = np.zeros((len(rows), max(map(len, rows), default=0)), dtype)
    for row, x in zip(out, rows, strict=True):
        row[: len(x)] = x
    return out
