"""What an evaluation found: scores of each task, their means with confidence intervals, and as
metrics, JSON and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from areal_x.evaluation.evaluation_set import EvaluationSet
from areal_x.evaluation.statistics import (
    CONFIDENCE,
    Comparison,
    Interval,
    compare_all,
    mean_interval,
    pass_at_k,
)
from areal_x.types import Episode, Scored, Task

PREFIX = "evaluation/"


@dataclass(frozen=True)
class SetResult:
    """The outcomes of T tasks that were attempted n times each.

    An attempt that failed or timed out counts as not solved, with a reward of 0: an answer that
    nobody could score helps nobody.
    """

    name: str
    greedy: bool
    threshold: float
    tasks: tuple[str, ...]
    """Ids of the tasks."""

    rewards: Float[np.ndarray, "T n"]
    """Of each attempt; NaN for one that was not scored."""

    tokens: float
    """Mean number of sampled tokens of a scored attempt; NaN without one."""

    @property
    def attempts(self) -> int:
        return int(self.rewards.shape[1])

    @property
    def failed(self) -> int:
        """Number of attempts that failed or timed out."""
        return int(np.isnan(self.rewards).sum())

    @property
    def ks(self) -> list[int]:
        """The k of pass@k: powers of two up to the number of attempts, and that number."""
        return sorted({1 << i for i in range(self.attempts.bit_length())} | {self.attempts})

    def scores(self) -> dict[str, Float[np.ndarray, " T"]]:
        """Returns one score a task for each statistic: `avg@n`, the mean reward of n attempts, and
        `pass@k`."""
        rewards = np.nan_to_num(self.rewards)
        solved: Int[np.ndarray, " T"] = (rewards >= self.threshold).sum(axis=1)
        attempts = np.full(len(solved), self.attempts)
        found = {f"avg@{self.attempts}": rewards.mean(axis=1)}
        return found | {f"pass@{k}": pass_at_k(attempts, solved, k) for k in self.ks}

    def statistics(self, confidence: float = CONFIDENCE) -> dict[str, Interval]:
        """Returns the mean over tasks of each score, with its confidence interval."""
        return {
            name: mean_interval(x, confidence, (0.0, 1.0) if within_zero_and_one(x) else None)
            for name, x in self.scores().items()
        }

    def metrics(self) -> dict[str, float]:
        """Returns the row of a run's metrics: each statistic and the ends of its 95 % interval."""
        row: dict[str, float] = {}
        for name, interval in self.statistics().items():
            ends = {"": interval.value, "/low": interval.low, "/high": interval.high}
            row |= {f"{PREFIX}{self.name}/{name}{end}": x for end, x in ends.items()}
        row[f"{PREFIX}{self.name}/failed"] = float(self.failed)
        row[f"{PREFIX}{self.name}/tokens"] = self.tokens
        return {key: x for key, x in row.items() if not math.isnan(x)}

    def to_json(self, confidence: float = CONFIDENCE) -> dict[str, Any]:
        """Returns everything, with the reward of each attempt, as JSON can hold it."""
        return {
            "name": self.name,
            "greedy": self.greedy,
            "attempts": self.attempts,
            "threshold": self.threshold,
            "confidence": confidence,
            "failed": self.failed,
            "tokens": finite(self.tokens),
            "statistics": {
                name: {"value": x.value, "low": finite(x.low), "high": finite(x.high)}
                for name, x in self.statistics(confidence).items()
            },
            "tasks": [
                {"id": id, "rewards": [finite(r) for r in rewards]}
                for id, rewards in zip(self.tasks, self.rewards.tolist(), strict=True)
            ],
        }


def result_of(
    evaluated: EvaluationSet, tasks: Sequence[Task], episodes: Sequence[Episode]
) -> SetResult:
    """Returns the result of a set from the episodes of its tasks: all attempts at the first one, then
    those at the second."""
    attempts = len(episodes) // max(len(tasks), 1)
    rewards = [e.reward if isinstance(e.outcome, Scored) else math.nan for e in episodes]
    lengths = [
        sum(int(t.mask.sum()) for t in e.trajectories)
        for e in episodes
        if isinstance(e.outcome, Scored)
    ]
    return SetResult(
        name=evaluated.name,
        greedy=evaluated.is_greedy,
        threshold=evaluated.threshold,
        tasks=tuple(task.id for task in tasks),
        rewards=np.asarray(rewards, np.float64).reshape(len(tasks), attempts),
        tokens=float(np.mean(lengths)) if lengths else math.nan,
    )


def within_zero_and_one(x: Float[np.ndarray, " T"]) -> bool:
    return bool(((x >= 0) & (x <= 1)).all())


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def compare_models(
    results: Mapping[str, Mapping[str, SetResult]], confidence: float = CONFIDENCE
) -> dict[str, dict[str, dict[tuple[str, str], Comparison]]]:
    """Compares models by each statistic of each set that they all have: set → statistic → pair of
    models → comparison.

    results: model → set → result. Tasks are those of one set, in one order, for all models.
    """
    (first, *_) = results.values()
    found: dict[str, dict[str, dict[tuple[str, str], Comparison]]] = {}
    for name, one in first.items():
        scores = {model: sets[name].scores() for model, sets in results.items()}
        found[name] = {
            statistic: compare_all({m: x[statistic] for m, x in scores.items()}, confidence)
            for statistic in one.scores()
        }
    return found


def comparisons_to_json(
    found: Mapping[str, Mapping[str, Mapping[tuple[str, str], Comparison]]], confidence: float
) -> list[dict[str, Any]]:
    """Returns one object for each set, statistic and pair of models."""
    return [
        {
            "set": name,
            "statistic": statistic,
            "models": list(pair),
            "difference": one.difference.value,
            "low": finite(one.difference.low),
            "high": finite(one.difference.high),
            "p_value": one.p_value,
            "tasks": one.tasks,
            "better": one.better,
            "worse": one.worse,
            "verdict": verdict(one, pair, confidence),
        }
        for name, statistics in found.items()
        for statistic, pairs in statistics.items()
        for pair, one in pairs.items()
    ]


def verdict(one: Comparison, pair: tuple[str, str], confidence: float) -> str:
    """Says which of two models is better, if the comparison tells with this confidence."""
    if one.p_value > 1 - confidence:
        return f"not told apart at {confidence:.0%} confidence"
    return f"{pair[one.difference.value > 0]} is better at {confidence:.0%} confidence"


def results_table(
    results: Mapping[str, Mapping[str, SetResult]], confidence: float = CONFIDENCE
) -> str:
    """Returns a table in Markdown with a row for each set, statistic and model."""
    share = f"{confidence:.0%} interval"
    rows = [["set", "tasks", "decoding", "statistic", "model", "value", share, "failed"]]
    for model, sets in results.items():
        for one in sets.values():
            for name, x in one.statistics(confidence).items():
                interval = "–" if math.isnan(x.low) else f"{x.low:.3f} to {x.high:.3f}"
                decoding = "greedy" if one.greedy else f"{one.attempts} sampled"
                rows.append(
                    [
                        one.name,
                        str(len(one.tasks)),
                        decoding,
                        name,
                        model,
                        f"{x.value:.3f}",
                        interval,
                        str(one.failed),
                    ]
                )
    return markdown(rows)


def comparisons_table(
    found: Mapping[str, Mapping[str, Mapping[tuple[str, str], Comparison]]],
    confidence: float = CONFIDENCE,
) -> str:
    """Returns a table in Markdown with a row for each set, statistic and pair of models."""
    share = f"{confidence:.0%} interval"
    rows = [["set", "statistic", "models", "difference", share, "p", "better/worse", "verdict"]]
    for name, statistics in found.items():
        for statistic, pairs in statistics.items():
            for pair, one in pairs.items():
                d = one.difference
                interval = "–" if math.isnan(d.low) else f"{d.low:+.3f} to {d.high:+.3f}"
                rows.append(
                    [
                        name,
                        statistic,
                        " → ".join(pair),
                        f"{d.value:+.3f}",
                        interval,
                        f"{one.p_value:.2g}",
                        f"{one.better}/{one.worse} of {one.tasks}",
                        verdict(one, pair, confidence),
                    ]
                )
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of texts, the first of which is the head, as a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        return f"| {' | '.join(x.ljust(w) for x, w in zip(row, widths, strict=True))} |"

    head, *body = map(line, rows)
    return "\n".join([head, f"|{'|'.join('-' * (w + 2) for w in widths)}|", *body])
