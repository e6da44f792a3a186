"""Computes the metrics of a step: durations of its phases, statistics of the groups that it
consumed, throughput, held-out loss. docs/metrics.md lists the keys."""

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

PHASES = {  # the phases of a step, and their names on the timeline
    "wait_seconds": "wait",
    "logprob_seconds": "log-probabilities",
    "update_seconds": "update",
    "publish_seconds": "publish",
}


class Stopwatch:
    """Measures the phases of a step in seconds, and records each as a span on the timeline.

    laps: duration of each phase so far, by its key in PHASES.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a phase, which began when the one before it ended."""
        now = time.perf_counter()
        timeline.add(PHASES[name], self.last, now, step=self.step)
        self.laps[name], self.last = now - self.last, now

    @property
    def total(self) -> float:
        return self.last - self.began


def describe_groups(
    groups: Sequence[Group], ages: Sequence[int], batches: Sequence[Batch] = ()
) -> dict[str, float]:
    """Statistics of the groups that a step consumed: rewards with the verifier's own numbers,
    lengths, ages; with the batches, also of their advantages. Keys without data are omitted."""
    episodes = [episode for group in groups for episode in group.scored]
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    return {
        **reward_metrics(
            [episode.outcome for episode in episodes if isinstance(episode.outcome, Scored)]
        ),
        **length_metrics(trajectories),
        **entropy_estimate(trajectories),
        **advantage_metrics(groups, batches),
        **kept_tokens(trajectories),
        "trained_tokens": int(sum(trajectory.mask.sum() for trajectory in trajectories)),
        "packed_tokens": int(sum(len(trajectory) for trajectory in trajectories)),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
    }


def reward_metrics(outcomes: Sequence[Scored]) -> dict[str, float]:
    rewards = [outcome.reward for outcome in outcomes]
    details = {name for outcome in outcomes for name in outcome.details}
    return {
        **mean_min_max("reward", rewards),
        **({"reward_std": float(np.std(rewards))} if rewards else {}),
        **{
            f"reward/{name}": float(
                np.mean([o.details[name] for o in outcomes if name in o.details])
            )
            for name in sorted(details)
        },
    }


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths of prompts (tokens before the first trained one) and of responses (trained tokens),
    and the share of truncated responses."""
    if not trajectories:
        return {}
    prompts = [int(t.mask.argmax()) if t.mask.any() else len(t) for t in trajectories]
    return {
        **mean_min_max("prompt_length", prompts),
        **mean_min_max("response_length", [int(t.mask.sum()) for t in trajectories]),
        "truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
    }


def mean_min_max(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        name: float(np.mean(values)),
        f"{name}_min": float(min(values)),
        f"{name}_max": float(max(values)),
    }


def entropy_estimate(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of -logprob over the tokens sampled from a policy, in nats a token: its expectation
    is the policy's entropy."""
    sampled = [t.logprobs[t.mask & (t.versions != NOT_THE_POLICY)] for t in trajectories]
    count = sum(map(len, sampled))
    return (
        {"entropy_estimate": -float(sum(x.sum(dtype=np.float64) for x in sampled)) / count}
        if count
        else {}
    )


def kept_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean number of tokens that truncated sampling left to choose from; none if nothing was
    left out."""
    counts = [t.kept.counts[t.kept.counts > 0] for t in trajectories if t.kept is not None]
    number = sum(map(len, counts))
    return {"kept_tokens": sum(int(x.sum()) for x in counts) / number} if number else {}


def advantage_metrics(groups: Sequence[Group], batches: Sequence[Batch]) -> dict[str, float]:
    """Shares of the data that give no training signal, if the algorithm has advantages: groups with
    equal rewards, and trained tokens with an advantage of 0."""
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
    """Number of the trajectories' tokens that are not stored, because they share another
    trajectory's copy."""
    total = sum(
        len(trajectory)
        for group in groups
        for episode in group.scored
        for trajectory in episode.trajectories
    )
    return total - sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)


def evaluate_held_out(batch: Batch, algorithm: Algorithm, trainer: Trainer) -> dict[str, float]:
    """The loss and its metrics, reduced over masked tokens, without a step: held_out/loss,
    held_out/…"""
    is_reward_model = algorithm.head != "policy"
    policy = (
        Policy(values=trainer.values(batch))
        if is_reward_model
        else Policy(logp=trainer.logprobs(batch))
    )
    terms, metrics = algorithm.loss(policy, batch)
    masked = {name: np.asarray(x)[batch.mask] for name, x in metrics.items()}
    reduced = {
        name: float(np.max(x, initial=0) if is_max_reduced(name) else np.mean(x))
        for name, x in masked.items()
    }
    return {
        f"held_out/{name}": x
        for name, x in {"loss": float(np.sum(batch.weights * terms)), **reduced}.items()
    }


def save_groups(file: Path, groups: Sequence[Group]) -> Path:
    """Writes one JSON line a trajectory: its task, reward, tokens, log-probabilities, mask and
    versions."""
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


def explained_variance(batch: Batch) -> dict[str, float]:
    """Share of the variance of returns that the critic's values predict, at most 1: 1 - var(R - V)
    / var(R)."""
    returns = np.asarray(batch.returns)[batch.mask]
    values = np.asarray(batch.old_values)[batch.mask]
    variance = float(np.var(returns))
    if variance == 0:
        return {}
    return {"explained_variance": 1 - float(np.var(returns - values)) / variance}


def throughput(
    row: Mapping[str, float], before: RolloutStats, after: RolloutStats, published: Published
) -> dict[str, float]:
    """Tokens per second of generation (over the whole step) and of training (while training); the
    rollout's counts so far; the cost of publishing."""
    staged = (
        {"published_bytes_per_second": published.bytes / published.seconds}
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
