"""Group-relative advantages against loops over the groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms.advantages import group_relative
from areal_x.errors import ConfigError

judged = st.lists(st.tuples(st.integers(-3, 3).map(float), st.integers(0, 3)), min_size=1, max_size=16)


def by_hand(rewards, groups, scale, eps=1e-6):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(own)) == 1:
            result.append(0.0)
            continue
        mean = sum(own) / len(own)
        population = {"group": own, "batch": list(rewards), "none": None}[scale]
        divisor = 1.0
        if population is not None:
            m = sum(population) / len(population)
            divisor = (sum((r - m) ** 2 for r in population) / (len(population) - 1)) ** 0.5 + eps
        result.append((reward - mean) / divisor)
    return result


@given(judged, st.sampled_from(["group", "batch", "none"]))
def test_group_relative_is_the_distance_from_the_groups_mean(judged, scale):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    np.testing.assert_allclose(group_relative(rewards, groups, scale), by_hand(rewards, groups, scale), rtol=1e-9, atol=1e-12)


@given(judged, st.integers(-5, 5), st.randoms(use_true_random=False))
def test_a_constant_added_to_all_rewards_changes_nothing_and_order_does_not_matter(judged, shift, random):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    plain = group_relative(rewards, groups)
    np.testing.assert_allclose(group_relative(rewards + shift, groups), plain, atol=1e-9)
    order = list(range(len(judged)))
    random.shuffle(order)
    np.testing.assert_allclose(group_relative(rewards[order], groups[order]), plain[order], atol=1e-12)


def test_a_group_without_variance_gives_zero_advantage_also_in_float32():
    rewards = np.full(7, 0.1, np.float32)  # the float32 mean of seven 0.1 is not 0.1
    assert (group_relative(rewards, np.zeros(7, int)) == 0).all()
    assert (group_relative(np.array([0.3]), np.array([5])) == 0).all()


def test_an_unknown_scale_is_refused_by_name():
    with pytest.raises(ConfigError, match="'group', 'batch', 'none'"):
        group_relative(np.array([1.0, 0.0]), np.array([0, 0]), "batches")
