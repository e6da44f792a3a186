"""Statistics of evaluations in which each of T tasks was attempted several times: pass@k, means,
confidence intervals and paired comparisons.

The tasks are the sample: another benchmark of the same kind would have other tasks, and attempts at
one task are not independent of each other. So each statistic is first computed for each task, and
intervals and tests are those of T independent numbers, one a task (standard errors clustered by
task; Miller, "Adding error bars to evals", arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Float, Int

from areal_x.errors import ConfigError, at_least, within

CONFIDENCE = 0.95
EXACT_TASKS = 12  # up to this many differing tasks, all 2^T sign flips are tried
FLIPS = 10_000  # beyond, as many at random
CHUNK = 1 << 22  # random signs in memory at once


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval."""

    value: float

    low: float
    """NaN, as `high`, if fewer than two tasks leave it unknown."""

    high: float


@dataclass(frozen=True)
class Comparison:
    """How much better a second model is than a first one on the same T tasks."""

    difference: Interval
    """Mean over tasks of the second's score minus the first's."""

    p_value: float
    """Two-sided, of the hypothesis that neither model is better: the share of all exchanges of the
    models within tasks that give a difference at least as large."""

    better: int
    """Number of tasks with a higher score of the second."""

    worse: int

    tasks: int


def pass_at_k(
    attempts: Int[np.ndarray, " T"], solved: Int[np.ndarray, " T"], k: int
) -> Float[np.ndarray, " T"]:
    """The unbiased estimate for each task of the probability that at least one of k attempts solves
    it, from n ≥ k attempts of which c did: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1,
    as the product that does not overflow.

    Raises: ConfigError if k is below 1 or a task has fewer than k attempts.
    """
    attempts, solved = np.asarray(attempts), np.asarray(solved)
    within("k", k, 1, int(attempts.min(initial=k)))
    n, c = attempts[:, None], solved[:, None]
    i = np.arange(k)
    # C(n - c, k) / C(n, k) = Π (n - c - i) / (n - i), and 0 as soon as a factor is
    return 1 - np.prod(np.clip((n - c - i) / (n - i), 0, None), axis=1)


def mean_interval(
    scores: Float[np.ndarray, " T"],
    confidence: float = CONFIDENCE,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """The mean of one score a task and its confidence interval, over the population that the tasks
    are a sample of.

    Scores within `bounds` (a pass rate, pass@k): Wilson's interval with the effective number of
    tasks, p (1 - p) / (s² / T), in place of their number, and Student's t for the normal quantile
    (Korn and Graubard 1998; Dean and Pagano 2015). It stays within the bounds, and is not empty if
    all tasks were solved. bounds None: mean ± t s / √T.

    Raises: ConfigError for a confidence outside 0 to 1.
    """
    if not 0 < confidence < 1:
        raise ConfigError("confidence", confidence, "between 0 and 1")
    x = np.asarray(scores, np.float64)
    tasks = len(x)
    mean = float(x.mean()) if tasks else math.nan
    if tasks < 2:
        return Interval(mean, math.nan, math.nan)
    t = t_quantile((1 + confidence) / 2, tasks - 1)
    variance = float(x.var(ddof=1)) / tasks
    if bounds is None:
        half = t * math.sqrt(variance)
        return Interval(mean, mean - half, mean + half)
    low, high = bounds
    p = min(max((mean - low) / (high - low), 0.0), 1.0)
    spread = variance / (high - low) ** 2
    # without any spread nothing but the number of tasks is known
    n = p * (1 - p) / spread if spread > 0 and 0 < p < 1 else float(tasks)
    centre = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n))
    # at p = 0 and 1 the bound itself, which rounding may miss
    lower, upper = min(max(centre - half, 0.0), p), max(min(centre + half, 1.0), p)
    return Interval(mean, low + lower * (high - low), low + upper * (high - low))


def compare(
    first: Float[np.ndarray, " T"],
    second: Float[np.ndarray, " T"],
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Compares two models by their scores on the same T tasks, in the same order.

    Interval: mean difference ± t s / √T, of the T differences. Test: if neither model were better,
    the two scores of a task could as well be exchanged, so the differences' signs are flipped, in all
    ways or in 10,000 random ones (Fisher's paired randomisation test; Dror et al., ACL 2018). It
    assumes no distribution, and its level is exact.

    Raises: ValueError for different numbers of tasks.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"models are compared on the same tasks: {len(a)} and {len(b)} were given")
    d = b - a
    return Comparison(
        mean_interval(d, confidence, bounds=None),
        _sign_flip_p_value(d, seed),
        better=int((d > 0).sum()),
        worse=int((d < 0).sum()),
        tasks=len(d),
    )


def compare_all(
    scores: Mapping[str, Float[np.ndarray, " T"]], confidence: float = CONFIDENCE, seed: int = 0
) -> dict[tuple[str, str], Comparison]:
    """Compares every two of several models, whose p-values are then adjusted so that all statements
    together err with probability 1 - confidence at most (Holm 1979)."""
    pairs = list(combinations(scores, 2))
    found = [compare(scores[a], scores[b], confidence, seed) for a, b in pairs]
    adjusted = holm([one.p_value for one in found])
    return {
        pair: Comparison(one.difference, p, one.better, one.worse, one.tasks)
        for pair, one, p in zip(pairs, found, adjusted, strict=True)
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts the p-values of several tests: the i-th smallest of m, from 0, times m - i, at least
    the one before and at most 1. Source: Holm, "A simple sequentially rejective multiple test
    procedure", 1979."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution with this many degrees of freedom, for a probability
    above one half, to 1e-10.

    Raises: ConfigError for fewer than one degree of freedom.
    """
    at_least("freedom", freedom, 1)
    high = 2.0
    while t_probability(high, freedom) < probability:
        high *= 2
    return _bisect(lambda t: t_probability(t, freedom) < probability, 0.0, high)


def t_probability(t: float, freedom: int) -> float:
    """P(T ≤ t) of Student's t distribution, by its finite trigonometric series. Source: Abramowitz
    and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if freedom == 1:
        total = 0.0
    for i in range(3 - (not odd), freedom - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        if term < 1e-17 * total:
            break
        total += term
    area = math.sin(angle) * total
    if odd:
        area = 2 / math.pi * (angle + area)
    return 0.5 + math.copysign(area, t) / 2


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    while high - low > 1e-11 * max(high, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def _sign_flip_p_value(differences: Float[np.ndarray, " T"], seed: int) -> float:
    d = differences[differences != 0]
    if len(d) == 0:
        return 1.0
    # sums of the same numbers in another order differ in their last bits
    observed = abs(float(d.sum())) * (1 - 1e-12)
    if len(d) <= EXACT_TASKS:
        flips = np.arange(1 << len(d))[:, None] >> np.arange(len(d)) & 1
        return float((np.abs((1 - 2 * flips) @ d) >= observed).mean())
    rng = np.random.default_rng(seed)
    as_large, left = 0, FLIPS
    while left:
        rows = min(left, max(1, CHUNK // len(d)))
        signs = rng.integers(0, 2, (rows, len(d)), np.int8) * 2 - 1
        as_large += int((np.abs(signs @ d) >= observed).sum())
        left -= rows
    # the observed signs are one of the flips: else the test would reject too often
    return (1 + as_large) / (1 + FLIPS)
