"""Statistics of evaluations against formulas by hand, enumerations and simulations."""

from __future__ import annotations

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.evaluation import statistics
from areal_x.evaluation.statistics import compare, compare_all, holm, mean_interval, pass_at_k, t_probability, t_quantile


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_that_have_a_solved_one(numbers):
    n, c, k = numbers
    solved = [True] * c + [False] * (n - c)
    choices = [any(solved[i] for i in chosen) for chosen in combinations(range(n), k)]
    assert len(choices) == comb(n, k)
    assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(np.mean(choices), abs=1e-12)


def test_pass_at_k_by_hand_for_tasks_with_different_numbers_of_attempts():
    found = pass_at_k(np.array([16, 16, 4, 1000]), np.array([0, 3, 4, 1]), 4)
    assert found == pytest.approx([0, 1 - comb(13, 4) / comb(16, 4), 1, 4 / 1000], abs=1e-12)
    with pytest.raises(ConfigError, match="k = 5"):
        pass_at_k(np.array([16, 4]), np.array([0, 0]), 5)
    with pytest.raises(ConfigError, match="k = 0"):
        pass_at_k(np.array([4]), np.array([0]), 0)


def test_pass_at_k_is_unbiased_where_one_minus_the_failure_rate_to_the_k_is_not():
    """The expectation over all outcomes of n attempts, each solved with probability p."""
    n, k, p = 6, 3, 0.3
    chance = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    estimates = pass_at_k(np.full(n + 1, n), np.arange(n + 1), k)
    assert chance @ estimates == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(chance @ (1 - (1 - np.arange(n + 1) / n) ** k) - (1 - (1 - p) ** k)) > 0.03


@pytest.mark.parametrize(
    "freedom, quantile",  # of printed tables
    [(1, 12.7062047), (2, 4.3026527), (3, 3.1824463), (5, 2.5705818), (10, 2.2281389), (29, 2.0452296), (1000, 1.9623391)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-7)
    assert t_probability(-quantile, freedom) == pytest.approx(0.025, abs=1e-8)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8])
def test_probabilities_of_students_t_are_the_integral_of_its_density(freedom):
    t = np.linspace(0, 1.7, 20001)
    density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    whole = np.tan(np.linspace(0, np.pi / 2, 200001)[:-1])  # the rest of the line, by a change of variable
    norm = 2 * np.trapezoid((1 + whole**2 / freedom) ** (-(freedom + 1) / 2) * (1 + whole**2), np.arctan(whole))
    assert t_probability(1.7, freedom) == pytest.approx(0.5 + np.trapezoid(density, t) / norm, abs=2e-5)


def test_without_clustering_the_interval_is_wilsons():
    """One attempt a task: the effective number of tasks is T - 1, as the variance is the unbiased one."""
    solved = np.repeat([1.0, 0.0], [13, 37])
    found = mean_interval(solved, 0.9)
    p, n, t = 0.26, 49, t_quantile(0.95, 49)
    # the roots of (p - x)² = t² x (1 - x) / n
    roots = np.roots([1 + t * t / n, -2 * p - t * t / n, p * p])
    assert (found.value, found.low, found.high) == pytest.approx((p, *sorted(roots)), abs=1e-12)


def test_intervals_that_nothing_narrows_and_of_other_scales():
    all_solved = mean_interval(np.ones(20))
    assert all_solved.high == 1.0
    assert 0.8 < all_solved.low < 0.9  # rule of three: 1 - 3/20
    none = mean_interval(np.zeros(20))
    assert (none.low, none.high) == (0.0, pytest.approx(1 - all_solved.low))
    x = np.random.default_rng(0).random(30)
    plain, scaled = mean_interval(x), mean_interval(4 * x - 1, bounds=(-1, 3))
    assert (scaled.low, scaled.high) == pytest.approx((4 * plain.low - 1, 4 * plain.high - 1))
    free = mean_interval(np.array([1.0, 3.0]), bounds=None)
    assert (free.value, free.high) == pytest.approx((2, 2 + 12.7062047))
    assert np.isnan(mean_interval(np.array([1.0])).low)
    with pytest.raises(ConfigError, match="confidence = 95"):
        mean_interval(x, 95)


@pytest.mark.parametrize("a, b", [(0.4, 0.6), (0.2, 2.0), (5.0, 5.0)])
@pytest.mark.parametrize("k", [1, 8])
def test_intervals_cover_as_often_as_they_state_over_tasks_of_different_difficulty(a, b, k):
    """500 evaluations of 40 tasks, 8 attempts each, whose rates of success are Beta(a, b); attempts that are pooled as if
    they were independent would cover far too seldom."""
    rng = np.random.default_rng([int(10 * a), k])
    rates = rng.beta(a, b, (500, 40))
    solved = rng.binomial(8, rates)
    # the mean over the population of 1 - (1 - p)^k, whose p is Beta: E (1 - p)^k = Π (b + i) / (a + b + i)
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(k)])
    covered, pooled = [], []
    for c in solved:
        found = mean_interval(pass_at_k(np.full(40, 8), c, k))
        covered.append(found.low <= truth <= found.high)
        p = c.sum() / 320
        pooled.append(abs(p - truth) <= 1.96 * np.sqrt(p * (1 - p) / 320))
    assert np.mean(covered) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 500)
    if k == 1 and a < 5:
        assert np.mean(pooled) < 0.85
    if a >= 0.4 and k == 1:
        assert np.mean(covered) < 0.99  # nor much wider than stated


def test_a_difference_by_hand_and_by_trying_every_exchange():
    a, b = np.array([0.1, 0.5, 0.25, 0.75, 0.5]), np.array([0.3, 0.5, 0.75, 0.5, 1.0])
    found = compare(a, b)
    d = b - a
    assert found.difference.value == pytest.approx(d.mean())
    half = 2.7764451 * d.std(ddof=1) / np.sqrt(5)
    assert (found.difference.low, found.difference.high) == pytest.approx((d.mean() - half, d.mean() + half))
    assert (found.better, found.worse, found.tasks) == (3, 1, 5)
    means = [abs(np.mean(np.array(signs) * d)) for signs in product((1, -1), repeat=5)]
    assert found.p_value == pytest.approx(np.mean([m >= abs(d.mean()) - 1e-12 for m in means]))
    assert compare(b, a).p_value == found.p_value
    assert compare(a, a).p_value == 1
    with pytest.raises(ValueError, match="5 and 4"):
        compare(a, b[:4])


def test_many_exchanges_at_random_agree_with_all_of_them(monkeypatch):
    d = np.random.default_rng(3).normal(0.4, 1, 12)
    exact = compare(np.zeros(12), d).p_value
    monkeypatch.setattr(statistics, "EXACT_TASKS", 0)
    monkeypatch.setattr(statistics, "CHUNK", 1000)  # several parts
    assert compare(np.zeros(12), d).p_value == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 10_000))


def test_equal_checkpoints_are_told_apart_as_seldom_as_stated_and_a_better_one_nearly_always(monkeypatch):
    """300 pairs of evaluations of 60 tasks of very different difficulty, 8 attempts each."""
    monkeypatch.setattr(statistics, "FLIPS", 1000)  # which the level does not depend on
    rng = np.random.default_rng(5)
    rejected, found, covered, unpaired = [], [], [], []
    for seed in range(300):
        rates = rng.beta(0.5, 0.5, 60)
        better = np.clip(rates + 0.1, 0, 1)
        a, b, c = (rng.binomial(8, p) / 8 for p in (rates, rates, better))
        rejected.append(compare(a, b, seed=seed).p_value <= 0.05)
        against = compare(a, c, seed=seed)
        found.append(against.p_value <= 0.05)
        covered.append(against.difference.low <= (better - rates).mean() <= against.difference.high)
        unpaired.append(abs(c.mean() - a.mean()) > 1.96 * np.sqrt((a.var(ddof=1) + c.var(ddof=1)) / 60))
    assert np.mean(rejected) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert np.mean(rejected) > 0.01
    assert np.mean(found) > 0.8
    assert np.mean(unpaired) < 0.1  # two intervals beside each other would not tell them apart
    assert np.mean(covered) > 0.92


def test_several_comparisons_are_adjusted_as_holm_does():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    rng = np.random.default_rng(0)
    scores = {name: rng.random(20) + shift for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.4))}
    together = compare_all(scores)
    assert list(together) == [("a", "b"), ("a", "c"), ("b", "c")]
    alone = [compare(scores[a], scores[b]).p_value for a, b in together]
    assert [one.p_value for one in together.values()] == holm(alone)
