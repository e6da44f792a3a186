"""Corrections against loops over tokens and sequences, and against trying every possible number of tokens to drop."""

from __future__ import annotations

from functools import partial
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms.corrections import importance, masked, rejected, second_moment, truncated
from areal_x.errors import ConfigError
from tests.algorithms.agreement import agree
from tests.algorithms.frameworks import apply, value_and_gradient

CORRECTIONS = {
    **{f"importance_{level}": partial(importance, level=level) for level in ("token", "sequence", "geometric")},
    **{f"truncated_{level}": partial(truncated, cap=1.1, level=level) for level in ("token", "sequence", "geometric")},
    **{f"masked_{level}": partial(masked, low=0.8, high=1.5, level=level) for level in ("token", "sequence", "geometric")},
    "masked_without_weight": partial(masked, low=0.8, high=1.5, reweight=False),
    "second_moment": second_moment,
    **{
        f"rejected_{metric}_{level}": partial(rejected, metric=metric, level=level, low=low, high=0.4)
        for metric, level, low in (("k1", "token", -0.5), ("k2", "sequence", None), ("k3", "sum", None), ("k3", "max", None))
    },
}
on_every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def make(seed: int = 0, garbage: float | None = None):
    """log_ratio, mask and segment_ids [3, 14]; segment 1 of row 0 has no masked token."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, (3, 14)), axis=1)[:, ::-1].astype(np.int32).copy()
    mask = (rng.random(ids.shape) < 0.7) & (ids > 0)
    mask[0, ids[0] == 1] = False
    log_ratio = rng.normal(size=ids.shape)
    if garbage is not None:
        log_ratio[~mask] = garbage
    return log_ratio, mask, ids


def ratio_by_hand(log_ratio, mask, ids, level, at):
    own = [log_ratio[at[0], t] for t in range(ids.shape[1]) if mask[at[0], t] and ids[at[0], t] == ids[at]]
    d = {"token": log_ratio[at], "sequence": sum(own), "geometric": sum(own) / len(own)}[level]
    return exp(min(max(d, -20), 20))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_importance_truncated_and_masked_are_the_formula_token_by_token(level, scale):
    log_ratio, mask, ids = make(2)
    log_ratio = log_ratio * scale
    ratios = importance(log_ratio, mask, ids, level)
    capped = truncated(log_ratio, mask, ids, 1.1, level)
    inside = masked(log_ratio, mask, ids, 0.8, 1.5, level)
    counted = masked(log_ratio, mask, ids, 0.8, 1.5, level, reweight=False)
    kinds = set()
    for at in np.ndindex(mask.shape):
        if not mask[at]:
            assert ratios[at] == capped[at] == inside[at] == counted[at] == 0
            continue
        ratio = ratio_by_hand(log_ratio, mask, ids, level, at)
        assert ratios[at] == pytest.approx(ratio, rel=1e-12)
        assert capped[at] == pytest.approx(min(ratio, 1.1), rel=1e-12)
        assert inside[at] == pytest.approx(ratio if 0.8 <= ratio <= 1.5 else 0, rel=1e-12)
        assert counted[at] == float(0.8 <= ratio <= 1.5)
        kinds.add((ratio < 0.8) - (ratio > 1.5))
    assert scale > 1 or kinds == {-1, 0, 1}


@pytest.mark.parametrize("level", ["token", "sequence", "sum", "max"])
@pytest.mark.parametrize("metric", ["k1", "k2", "k3"])
@pytest.mark.parametrize("low, high", [(None, 0.3), (0.1, 0.8), (-0.4, None), (None, None)])
def test_rejection_is_the_formula_sequence_by_sequence(metric, level, low, high):
    of_token = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(d) - 1 - d}[metric]
    kinds = set()
    for seed in range(3):
        log_ratio, mask, ids = make(seed)
        found = rejected(log_ratio, mask, ids, metric, level, low, high)
        for at in np.ndindex(mask.shape):
            own = [of_token(log_ratio[at[0], t]) for t in range(14) if mask[at[0], t] and ids[at[0], t] == ids[at]]
            values = {"token": [of_token(log_ratio[at])], "sequence": [np.mean(own or [0])], "sum": [sum(own)], "max": own}[
                level
            ]
            inside = all((low is None or x >= low) and (high is None or x <= high) for x in values)
            assert found[at] == float(mask[at] and inside)
            kinds |= {inside} if mask[at] else set()
    assert True in kinds or level != "token"
    assert (False in kinds) == (not (low is None and high is None) and not (low == -0.4 and metric != "k1"))


def test_a_bound_that_is_none_does_not_bind_and_a_bound_itself_is_kept():
    log_ratio, mask, ids = np.array([[-9.0, 0.0, 9.0]]), np.ones((1, 3), bool), np.ones((1, 3), np.int32)
    of = partial(masked, log_ratio, mask, ids, reweight=False)
    assert of().tolist() == [[1, 1, 0]]
    assert of(low=0.5, high=None).tolist() == [[0, 1, 1]]
    assert of(low=1.0, high=1.0).tolist() == [[0, 1, 0]]


def dropped_one_value_at_a_time(squares, threshold):
    """The values that are kept: the largest is dropped, with its ties, while the mean exceeds the threshold and others
    remain."""
    kept = sorted(squares)
    while sum(kept) / len(kept) > threshold and kept[0] != kept[-1]:
        kept = [s for s in kept if s != kept[-1]]
    return set(kept)


@given(st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=1, max_size=24), st.sampled_from([0.0, 0.04, 0.5, 9.0]))
def test_second_moment_drops_the_largest_until_the_mean_of_the_squares_is_small_enough(tokens, threshold):
    log_ratio = np.array([d / 4 for d, _ in tokens]).reshape(1, -1)
    mask = np.array([m for _, m in tokens]).reshape(1, -1)
    live = [(d / 4) ** 2 for d, m in tokens if m]
    stay = dropped_one_value_at_a_time(live, threshold) if live else set()
    expected = [[float(m and (d / 4) ** 2 in stay) for d, m in tokens]]
    assert second_moment(log_ratio, mask, np.ones(mask.shape, np.int32), threshold).tolist() == expected


@given(st.randoms(use_true_random=False))
def test_second_moment_looks_at_the_whole_batch_and_not_at_rows_or_order(random):
    log_ratio, mask, ids = make(1)
    order = list(range(log_ratio.size))
    random.shuffle(order)
    shuffled = second_moment(log_ratio.ravel()[order].reshape(14, 3), mask.ravel()[order].reshape(14, 3), ids.reshape(14, 3))
    np.testing.assert_array_equal(shuffled.ravel(), second_moment(log_ratio, mask, ids).ravel()[order])


def test_second_moment_keeps_a_token_where_all_are_far_off_or_beyond_any_number():
    mask, ids = np.ones((1, 3), bool), np.ones((1, 3), np.int32)
    assert second_moment(np.array([[-3.0, 2.0, 5.0]]), mask, ids).tolist() == [[0, 1, 0]]
    assert second_moment(np.array([[np.nan, 0.1, -np.inf]]), mask, ids).tolist() == [[0, 1, 0]]


def test_a_correction_of_nothing_is_one():
    _, mask, ids = make()
    for function in CORRECTIONS.values():
        np.testing.assert_array_equal(function(np.zeros(mask.shape), mask, ids), mask.astype(float))


@on_every_correction
def test_numpy_jax_and_torch_agree(name):
    compiled = ("importance_sequence", "truncated_geometric", "masked_token", "second_moment")  # each function and level
    agree(CORRECTIONS[name], *make(2), torch_compiled=name in compiled)


@on_every_correction
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_garbage_behind_the_mask_changes_nothing(name, framework, garbage):
    of = partial(apply, CORRECTIONS[name], framework=framework, compiled=framework == "jax")
    np.testing.assert_array_equal(of(*make(3, garbage)), of(*make(3)))


@on_every_correction
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_a_batch_without_a_masked_token_has_corrections_of_zero(name, framework):
    log_ratio, mask, ids = make(4)
    of = partial(apply, CORRECTIONS[name], framework=framework, compiled=framework == "jax")
    assert (of(log_ratio, np.zeros_like(mask), ids) == 0).all()


@on_every_correction
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_no_gradient_flows(name, framework):
    log_ratio, mask, ids = make(5)

    def total(leaves, rest):
        return (CORRECTIONS[name](leaves["d"], rest["mask"], rest["ids"]) * leaves["d"]).sum()

    value, gradient = value_and_gradient(total, {"d": log_ratio}, {"mask": mask, "ids": ids}, framework=framework)
    weights = CORRECTIONS[name](log_ratio, mask, ids)
    np.testing.assert_allclose(gradient["d"], weights, rtol=1e-10)  # that of the other factor alone
    np.testing.assert_allclose(value, (weights * log_ratio).sum(), rtol=1e-10)


@pytest.mark.parametrize(
    "function, names",
    [
        (partial(importance, level="sequences"), r"importance\.level.*did you mean 'sequence'"),
        (partial(truncated, level="word"), r"truncated\.level"),
        (partial(masked, level="word"), r"masked\.level"),
        (partial(truncated, cap=0), r"truncated\.cap"),
        (partial(masked, low=2.0, high=1.0), r"masked\.low = 2\.0 .* at most masked\.high = 1\.0"),
        (partial(masked, low=-0.5), r"masked\.low"),
        (partial(masked, high=0.0), r"masked\.high"),
        (partial(rejected, metric="k4"), r"rejected\.metric"),
        (partial(rejected, level="geometric"), r"rejected\.level"),
        (partial(rejected, low=2.0, high=1.0), r"rejected\.low = 2\.0 .* at most rejected\.high = 1\.0"),
        (partial(second_moment, threshold=-1.0), r"second_moment\.threshold"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(function, names):
    with pytest.raises(ConfigError, match=names):
        function(*make())
