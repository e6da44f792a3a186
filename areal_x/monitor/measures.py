"""What a turn of the ring writes down: how long its parts took, what it consumed, what its models
foretold."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.protocols.trainer import Trainer, is_max_reduced
from areal_x.rollout.rollout import Published
from areal_x.rollout.runner import RolloutStats
from areal_x.runtime import timeline
from areal_x.types import NOT_THE_POLICY, Batch, Group, Policy, Scored, Trajectory

LAPS = {  # what a step consists of, and what it is called on the timeline
    "wait_seconds": "wait",
    "logprob_seconds": "log-probabilities",
    "update_seconds": "update",
    "publish_seconds": "publish",
}


class Stopwatch:
    """Seconds of each lap of a step since the one before, by name, and a span each on the
    timeline."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        timeline.add(LAPS[name], self.last, now, step=self.step)
        self.laps[name], self.last = now - self.last, now

    @property
    def total(self) -> float:
        return self.last - self.began


def describe(
    groups: Sequence[Group], ages: Sequence[int], batches: Sequence[Batch] = ()
) -> dict[str, float]:
    """What a step consumed: rewards with the verifier's own numbers, lengths, ages; with the
    batches, what it can learn from them. What there is nothing of is left out. docs/metrics.md
    lists the keys."""
    episodes = [episode for group in groups for episode in group.scored]
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    return {
        **of_rewards(
            [episode.outcome for episode in episodes if isinstance(episode.outcome, Scored)]
        ),
        **of_lengths(trajectories),
        **entropy_estimate(trajectories),
        **of_advantages(groups, batches),
        "trained_tokens": int(sum(trajectory.mask.sum() for trajectory in trajectories)),
        "packed_tokens": int(sum(len(trajectory) for trajectory in trajectories)),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
    }


def of_rewards(outcomes: Sequence[Scored]) -> dict[str, float]:
    rewards = [outcome.reward for outcome in outcomes]
    details = {name for outcome in outcomes for name in outcome.details}
    return {
        **spread("reward", rewards),
        **({"reward_std": float(np.std(rewards))} if rewards else {}),
        **{
            f"reward/{name}": float(
                np.mean([o.details[name] for o in outcomes if name in o.details])
            )
            for name in sorted(details)
        },
    }


def of_lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """A prompt: the tokens before the first that is trained on. A response: the tokens that are."""
    if not trajectories:
        return {}
    prompts = [int(t.mask.argmax()) if t.mask.any() else len(t) for t in trajectories]
    return {
        **spread("prompt_length", prompts),
        **spread("response_length", [int(t.mask.sum()) for t in trajectories]),
        "truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        name: float(np.mean(values)),
        f"{name}_min": float(min(values)),
        f"{name}_max": float(max(values)),
    }


def entropy_estimate(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of -log b over the tokens that a policy b sampled, whose expectation is b's entropy:
    in nats a token."""
    sampled = [t.logprobs[t.mask & (t.versions != NOT_THE_POLICY)] for t in trajectories]
    count = sum(map(len, sampled))
    return (
        {"entropy_estimate": -float(sum(x.sum(dtype=np.float64) for x in sampled)) / count}
        if count
        else {}
    )


def of_advantages(groups: Sequence[Group], batches: Sequence[Batch]) -> dict[str, float]:
    """What keeps a step from learning, where the algorithm has advantages: groups whose rewards are
    all equal, and trained tokens whose advantage is 0."""
    with_advantages = [batch for batch in batches if batch.advantages is not None]
    if not with_advantages:
        return {}
    trained = np.concatenate(
        [np.asarray(batch.advantages)[np.asarray(batch.mask)] for batch in with_advantages]
    )
    return {
        "groups_without_variance": float(
            np.mean([len(set(group.rewards)) < 2 for group in groups])
        ),
        **({"zero_advantages": float(np.mean(trained == 0))} if len(trained) else {}),
    }


def saved_tokens(groups: Sequence[Group], batches: Sequence[Batch]) -> int:
    """How many tokens of the trajectories lie in no row of their own, as another one's copy is read
    in their place."""
    whole = sum(
        len(trajectory)
        for group in groups
        for episode in group.scored
        for trajectory in episode.trajectories
    )
    return whole - sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)


def judge(batch: Batch, algorithm: Algorithm, trainer: Trainer) -> dict[str, float]:
    """The loss and the means of its metrics over masked tokens, without a step: held_out/loss,
    held_out/…"""
    scores = algorithm.head != "policy"
    policy = (
        Policy(values=trainer.values(batch)) if scores else Policy(logp=trainer.logprobs(batch))
    )
    terms, metrics = algorithm.loss(policy, batch)
    of_tokens = {name: np.asarray(x)[batch.mask] for name, x in metrics.items()}
    means = {
        name: float(np.max(x, initial=0) if is_max_reduced(name) else np.mean(x))
        for name, x in of_tokens.items()
    }
    return {
        f"held_out/{name}": x
        for name, x in {"loss": float(np.sum(batch.weights * terms)), **means}.items()
    }


def save_groups(file: Path, groups: Sequence[Group]) -> Path:
    """One line a trajectory: its task, reward, tokens, log-probabilities, mask and versions."""
    with file.open("w") as lines:
        for group in groups:
            for trajectory in (t for episode in group.scored for t in episode.trajectories):
                arrays = {
                    name: getattr(trajectory, name).tolist()
                    for name in ("tokens", "logprobs", "mask", "versions")
                }
                lines.write(
                    json.dumps({"task": group.task.id, "reward": trajectory.reward, **arrays})
                    + "\n"
                )
    return file


def explained(batch: Batch) -> dict[str, float]:
    """How much of the variance of returns the critic's values foretold, 1 being all: 1 - var(R - V)
    / var(R)."""
    returns, values = (
        np.asarray(batch.returns)[batch.mask],
        np.asarray(batch.old_values)[batch.mask],
    )
    variance = float(np.var(returns))
    return (
        {"explained_variance": 1 - float(np.var(returns - values)) / variance}
        if variance > 0
        else {}
    )


def rates(
    row: Mapping[str, float], before: RolloutStats, after: RolloutStats, published: Published
) -> dict[str, float]:
    """Tokens a second of generation (over the whole turn) and of training (while it trained); the
    rollout's counts so far; what publishing took."""
    staged = (
        {"published_bytes_per_second": published.bytes / row["publish_seconds"]}
        if published.bytes
        else {}
    )
    return {
        "generated_tokens": after.generated_tokens,
        "generation_tokens_per_second": (
            (after.generated_tokens - before.generated_tokens) / row["seconds"]
        ),
        "training_tokens_per_second": (
            row["packed_tokens"] / (row["logprob_seconds"] + row["update_seconds"])
        ),
        "queue_depth": after.depth,
        "scored": after.scored,
        "failed": after.failed,
        "timed_out": after.timed_out,
        "given_back": after.given_back,
        "left_out": after.left_out,
        "pause_seconds": published.paused_seconds,
        **staged,
    }
