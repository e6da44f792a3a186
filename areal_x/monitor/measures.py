"""What a turn of the ring writes down: how long its parts took, what it consumed, what its models foretold."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from areal_x.algorithms.algorithm import Algorithm
from areal_x.monitor import timeline
from areal_x.rollout.runner import RolloutStats
from areal_x.trainer import Trainer, is_largest
from areal_x.types import Batch, Group, Policy, Scored

LAPS = {  # what a step consists of, and what it is called on the timeline
    "wait_seconds": "wait",
    "logprob_seconds": "log-probabilities",
    "update_seconds": "update",
    "publish_seconds": "publish",
}


class Stopwatch:
    """Seconds of each lap of a step since the one before, by name, and a span each on the timeline."""

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


def describe(groups: Sequence[Group], ages: Sequence[int]) -> dict[str, float]:
    """What a step consumed: rewards with the verifier's own numbers, lengths, ages."""
    outcomes = [episode.outcome for group in groups for episode in group.scored]
    trajectories = [trajectory for group in groups for episode in group.scored for trajectory in episode.trajectories]
    scored = [outcome for outcome in outcomes if isinstance(outcome, Scored)]
    details = {name for outcome in scored for name in outcome.details}
    return {
        "reward": float(np.mean([outcome.reward for outcome in scored])),
        **{
            f"reward/{name}": float(np.mean([o.details[name] for o in scored if name in o.details])) for name in sorted(details)
        },
        "response_length": float(np.mean([trajectory.mask.sum() for trajectory in trajectories])),
        "trained_tokens": int(sum(trajectory.mask.sum() for trajectory in trajectories)),
        "packed_tokens": int(sum(len(trajectory) for trajectory in trajectories)),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
    }


def saved_tokens(groups: Sequence[Group], batches: Sequence[Batch]) -> int:
    """How many tokens of the trajectories lie in no row of their own, as another one's copy is read in their place."""
    whole = sum(len(trajectory) for group in groups for episode in group.scored for trajectory in episode.trajectories)
    return whole - sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)


def judge(batch: Batch, algorithm: Algorithm, trainer: Trainer) -> dict[str, float]:
    """The loss and the means of its metrics over masked tokens, without a step: held_out/loss, held_out/…"""
    scores = algorithm.head != "policy"
    policy = Policy(values=trainer.values(batch)) if scores else Policy(logp=trainer.logprobs(batch))
    terms, metrics = algorithm.loss(policy, batch)
    of_tokens = {name: np.asarray(x)[batch.mask] for name, x in metrics.items()}
    means = {name: float(np.max(x, initial=0) if is_largest(name) else np.mean(x)) for name, x in of_tokens.items()}
    return {f"held_out/{name}": x for name, x in {"loss": float(np.sum(batch.weights * terms)), **means}.items()}


def save_groups(file: Path, groups: Sequence[Group]) -> Path:
    """One line a trajectory: its task, reward, tokens, log-probabilities, mask and versions."""
    with file.open("w") as lines:
        for group in groups:
            for trajectory in (t for episode in group.scored for t in episode.trajectories):
                arrays = {name: getattr(trajectory, name).tolist() for name in ("tokens", "logprobs", "mask", "versions")}
                lines.write(json.dumps({"task": group.task.id, "reward": trajectory.reward, **arrays}) + "\n")
    return file


def explained(batch: Batch) -> dict[str, float]:
    """How much of the variance of returns the critic's values foretold, 1 being all: 1 - var(R - V) / var(R)."""
    returns, values = np.asarray(batch.returns)[batch.mask], np.asarray(batch.old_values)[batch.mask]
    variance = float(np.var(returns))
    return {"explained_variance": 1 - float(np.var(returns - values)) / variance} if variance > 0 else {}


def rates(row: Mapping[str, float], before: RolloutStats, after: RolloutStats) -> dict[str, float]:
    """Tokens a second of generation (over the whole turn) and of training (while it trained); the rollout's counts so far."""
    return {
        "generated_tokens": after.generated_tokens,
        "generation_tokens_per_second": (after.generated_tokens - before.generated_tokens) / row["seconds"],
        "training_tokens_per_second": row["packed_tokens"] / (row["logprob_seconds"] + row["update_seconds"]),
        "queue_depth": after.depth,
        "scored": after.scored,
        "failed": after.failed,
        "timed_out": after.timed_out,
        "given_back": after.given_back,
    }
