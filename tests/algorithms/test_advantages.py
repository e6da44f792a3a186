"""Advantages against loops over the groups and over the tokens."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.algorithms.advantages import (
    bootstrapped,
    discount_turns,
    gae,
    greedy_baseline,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
    mean_normalized,
    returns_to_go,
    turn_gae,
    whiten,
)
from areal_x.errors import ConfigError
from tests.algorithms.agreement import agree
from tests.algorithms.frameworks import apply, bare

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


@settings(max_examples=50)
@given(judged, st.sampled_from(["group", "batch", "none"]))
def test_group_relative_is_the_distance_from_the_groups_mean(judged, scale):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    np.testing.assert_allclose(group_relative(rewards, groups, scale), by_hand(rewards, groups, scale), rtol=1e-9, atol=1e-12)


@given(judged)
def test_leave_one_out_is_the_distance_from_the_mean_of_the_others(judged):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    expected = []
    for i, group in enumerate(groups):
        others = [r for j, r in enumerate(rewards) if j != i and groups[j] == group]
        expected.append(rewards[i] - sum(others) / len(others) if others else 0.0)
    np.testing.assert_allclose(leave_one_out(rewards, groups), expected, rtol=1e-12, atol=1e-12)


@given(judged, st.data())
def test_the_length_weighted_baseline_is_the_mean_reward_of_a_groups_tokens(judged, data):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    lengths = np.array(data.draw(st.lists(st.integers(1, 900), min_size=len(rewards), max_size=len(rewards))))
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        tokens = [r for r, n, g in zip(rewards, lengths, groups, strict=True) if g == group for _ in range(n)]
        expected.append(reward - sum(tokens) / len(tokens))
    np.testing.assert_allclose(length_weighted_baseline(rewards, lengths, groups), expected, rtol=1e-9, atol=1e-9)


def test_a_group_that_has_no_tokens_leaves_the_others_as_they_are():
    rewards, groups = np.array([1.0, 0.0, 1.0, 0.0]), np.array([4, 4, 2, 2])
    found = length_weighted_baseline(rewards, np.array([3, 1, 0, 0]), groups)
    np.testing.assert_allclose(found[:2], [0.25, -0.75])
    assert np.isfinite(found).all()


def test_the_greedy_baseline_is_the_distance_from_the_greedy_answer():
    found = greedy_baseline(np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.5]))
    np.testing.assert_array_equal(found, [1.0, -1.0, 0.0])


of_lengths = bare(length_weighted_baseline)
BY_GROUP = {
    "group_relative": group_relative,
    "group_relative_batch": partial(group_relative, scale="batch"),
    "group_relative_none": partial(group_relative, scale="none"),
    "leave_one_out": leave_one_out,
    # A length that is a function of the reward, so that a permutation moves both.
    "length_weighted_baseline": lambda r, g: of_lengths(r, (r - r.min()) + 1, g),
}
on_every_group_baseline = pytest.mark.parametrize("name", BY_GROUP)


@on_every_group_baseline
@settings(max_examples=25)
@given(judged=judged, shift=st.integers(-5, 5), random=st.randoms(use_true_random=False))
def test_a_constant_added_to_all_rewards_changes_nothing_and_order_does_not_matter(name, judged, shift, random):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    plain = BY_GROUP[name](rewards, groups)
    np.testing.assert_allclose(BY_GROUP[name](rewards + shift, groups), plain, atol=1e-9)
    order = list(range(len(judged)))
    random.shuffle(order)
    np.testing.assert_allclose(BY_GROUP[name](rewards[order], groups[order]), plain[order], atol=1e-12)


@on_every_group_baseline
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_a_group_without_variance_gives_zero_advantage_also_in_float32(name, framework):
    rewards = np.full(7, 0.1)  # the float32 mean of seven 0.1 is not 0.1
    of_group = partial(apply, BY_GROUP[name], framework=framework, dtype=np.float32)
    groups_of_one = [5, 0, -7]
    assert (of_group(np.append(rewards, [0.7, 0.2, 0.3]), np.array([4] * 7 + groups_of_one, np.int32)) == 0).all()
    of_both = of_group(np.append(rewards, [0.7, 0.2, 0.3]), np.array([4] * 7 + [-2, -2, 9], np.int32))
    assert (of_both[:7] == 0).all()
    assert (of_both[7:9] != 0).all()
    assert of_both[9] == 0


@on_every_group_baseline
def test_numpy_jax_and_torch_agree_on_baselines_of_groups(name):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=10), rng.integers(-3, 2, 10).astype(np.int32)
    agree(BY_GROUP[name], *inputs, torch_compiled=name not in ("group_relative", "group_relative_none"))


def test_groups_may_be_numpy_beside_the_rewards_of_a_framework():
    rewards, groups = np.array([1.0, 0.0, 0.5, 0.25]), np.array([2, 2, -1, -1])
    expected = leave_one_out(rewards, groups)
    for framework in ("jax", "torch"):
        found = apply(lambda r: leave_one_out(r, groups), rewards, framework=framework, compiled=framework == "jax")
        np.testing.assert_allclose(found, expected)


def test_an_unknown_scale_is_refused_by_name():
    with pytest.raises(ConfigError, match="'group', 'batch', 'none'"):
        group_relative(np.array([1.0, 0.0]), np.array([0, 0]), "batches")


def written_by_the_policy(seed: int, garbage: float | None = None, shape: tuple[int, int] = (5, 13)):
    """rewards, values and mask [S, T]: tool output at random places and at the end of row 0; row 1 has no masked token."""
    rng = np.random.default_rng(seed)
    rewards, values, mask = rng.normal(size=shape), rng.normal(size=shape), rng.random(shape) < 0.6
    mask[0, -3:], mask[1], mask[2] = False, False, True
    if garbage is not None:
        rewards[~mask], values[~mask] = garbage, garbage
    return rewards, values, mask


def sums_over_what_is_to_come(rewards, values, mask, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k} over a row's masked tokens taken out of it: no recurrence."""
    result = np.zeros_like(rewards)
    for row in range(len(mask)):
        live = np.flatnonzero(mask[row])
        r, v = rewards[row, live], np.append(values[row, live], 0.0)
        for i, t in enumerate(live):
            result[row, t] = sum((gamma * lam) ** (k - i) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(i, len(live)))
    return result


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_gae_is_the_discounted_sum_of_what_the_masked_tokens_exceed_their_value_by(gamma, lam):
    rewards, values, mask = written_by_the_policy(0)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(advantages, sums_over_what_is_to_come(rewards, values, mask, gamma, lam), atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, advantages + values, 0), atol=1e-12)
    assert (advantages[~mask] == 0).all()


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
def test_a_truncated_sequence_goes_on_with_the_last_value_that_is_known(gamma, lam):
    """As if a token followed it whose value is that of the last one, and whose own delta is 0."""
    rewards, values, mask = written_by_the_policy(0)
    truncated = np.array([True, True, True, False, True])
    found, returns = gae(bootstrapped(rewards, values, mask, truncated, gamma), values, mask, gamma, lam)
    expected = sums_over_what_is_to_come(rewards, values, mask, gamma, lam)
    for row in np.flatnonzero(truncated & mask.any(1)):
        live = np.flatnonzero(mask[row])
        for i, t in enumerate(live):
            expected[row, t] += (gamma * lam) ** (len(live) - 1 - i) * gamma * values[row, live[-1]]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, found + values, 0), atol=1e-12)
    nobody = bootstrapped(rewards, values, mask, np.zeros(5, bool), gamma)
    np.testing.assert_array_equal(nobody, np.where(mask, rewards, 0))


def turns_of(mask):
    """The runs of adjacent masked tokens of a row."""
    edges = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0]))
    return [list(range(a, b)) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_turn_gae_is_gae_of_a_sequence_with_one_token_a_turn(gamma, lam, cut):
    rewards, values, mask = written_by_the_policy(1)
    earned = bootstrapped(rewards, values, mask, np.full(5, cut), gamma)
    advantages, returns = turn_gae(earned, values, mask, gamma, lam)
    expected, target, several = np.zeros_like(rewards), np.zeros_like(rewards), False
    for row in range(5):
        turns = turns_of(mask[row])
        several |= len(turns) > 2
        r = [sum(rewards[row, t] for t in turn) for turn in turns]
        v = [values[row, turn[0]] for turn in turns] + [values[row, turns[-1][-1]] if cut and turns else 0.0]
        for k, turn in enumerate(turns):
            later = range(k, len(turns))
            a = sum((gamma * lam) ** (i - k) * (r[i] + gamma * v[i + 1] - v[i]) for i in later)
            expected[row, turn], target[row, turn] = a, a + v[k]
    assert several
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, target, atol=1e-12)


@given(judged)
def test_mean_normalized_is_the_distance_from_the_groups_mean_in_units_of_it(judged):
    rewards, groups = map(np.array, zip(*judged, strict=True))
    rewards = abs(rewards)
    for i, found in enumerate(mean_normalized(rewards, groups)):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        mean = sum(own) / len(own)
        assert found == pytest.approx((rewards[i] - mean) / mean if mean > 0 else 0.0, abs=1e-9)


@pytest.mark.parametrize("attempts", [2, 5])
def test_the_gradient_of_maxrl_is_that_of_pass_at_k_summed_up_to_one_less_than_the_attempts(attempts):
    """Expected over all outcomes of attempts that succeed with probability σ(x): Σ_{k<n} (1 - p)^(k-1) dp/dx."""
    x = 0.3
    p = 1 / (1 + np.exp(-x))
    expected = 0.0
    for outcome in product((0.0, 1.0), repeat=attempts):
        rewards = np.array(outcome)
        chance = np.prod(np.where(rewards == 1, p, 1 - p))
        scores = np.where(rewards == 1, 1 - p, -p)  # d log-probability / dx
        expected += chance * np.mean(mean_normalized(rewards, np.zeros(attempts, np.int32)) * scores)
    wanted = sum((1 - p) ** (k - 1) for k in range(1, attempts)) * p * (1 - p)
    assert expected == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_to_go_is_the_discounted_sum_of_the_rewards_of_the_masked_tokens_to_come(gamma):
    rewards, _, mask = written_by_the_policy(1)
    expected = sums_over_what_is_to_come(rewards, np.zeros_like(rewards), mask, gamma, 1.0)
    np.testing.assert_allclose(returns_to_go(rewards, mask, gamma), expected, atol=1e-12)


def test_a_tools_output_is_stepped_over_without_discount_also_at_the_end():
    rewards, mask = np.array([[0.0, 7.0, 7.0, 0.0, 1.0, 7.0]]), np.array([[True, False, False, True, True, False]])
    expected = [[0.25, 0, 0, 0.5, 1, 0]]
    np.testing.assert_array_equal(returns_to_go(rewards, mask, 0.5), expected)
    advantages, returns = gae(rewards, np.zeros_like(rewards), mask, 0.5)
    np.testing.assert_array_equal(advantages, expected)
    np.testing.assert_array_equal(returns, expected)


def test_whitened_advantages_are_those_less_their_mean_over_their_deviation():
    advantages, _, mask = written_by_the_policy(2)
    live = [a for a, m in zip(advantages.flat, mask.flat, strict=True) if m]
    mean = sum(live) / len(live)
    variance = sum((a - mean) ** 2 for a in live) / (len(live) - 1)
    expected = np.where(mask, (advantages - mean) / (variance + 1e-8) ** 0.5, 0)
    np.testing.assert_allclose(whiten(advantages, mask), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(whiten(advantages + 3, mask), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_what_cannot_be_whitened_is_zero(framework):
    of = partial(apply, whiten, framework=framework, dtype=np.float32, compiled=framework == "jax")
    place = np.arange(8)[None]
    for mask in (place < 7, place < 8, place == 3):  # the float32 mean of seven 0.1 is not 0.1
        assert (of(np.full((1, 8), 0.1), mask) == 0).all()
        assert (of(np.full((1, 8), -0.1), mask) == 0).all()
    assert (of(np.full((1, 8), np.nan), place > 8) == 0).all()


@given(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=9), st.floats(0, 1))
def test_a_turn_is_credited_with_the_discounted_rewards_of_the_turns_that_follow(turns, gamma):
    expected = [sum(gamma ** (j - k) * turns[j] for j in range(k, len(turns))) for k in range(len(turns))]
    np.testing.assert_allclose(discount_turns(np.array(turns), gamma), expected, atol=1e-9)
    np.testing.assert_allclose(discount_turns(np.array([[turns, turns]]), gamma), [[expected, expected]], atol=1e-9)


def test_the_rewards_that_come_in_are_left_as_they_were():
    rewards, values, mask = written_by_the_policy(3)
    before = rewards.copy(), values.copy()
    gae(rewards, values, mask), returns_to_go(rewards, mask), whiten(rewards, mask), discount_turns(rewards, 0.5)
    np.testing.assert_array_equal((rewards, values), before)


of_values, of_rewards, of_turns = bare(gae), bare(returns_to_go), bare(discount_turns)
of_turns_values = bare(turn_gae)
BY_TOKEN = {
    "gae": lambda r, v, m: of_values(r, v, m, 0.9, 0.8),
    "bootstrapped": lambda r, v, m: bootstrapped(r, v, m, m[:, 2], 0.9),
    "turn_gae": lambda r, v, m: of_turns_values(r, v, m, 0.9, 0.8),
    "returns_to_go": lambda r, v, m: of_rewards(r, m, 0.9),
    "whiten": lambda r, v, m: whiten(r, m),
    "discount_turns": lambda r, v, m: of_turns(r, 0.9),
    "greedy_baseline": lambda r, v, m: greedy_baseline(r, v),
}


@pytest.mark.parametrize("name", BY_TOKEN)
def test_numpy_jax_and_torch_agree_on_tokens(name):
    agree(BY_TOKEN[name], *written_by_the_policy(4))


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_frameworks_that_double_their_steps_agree_with_the_loop_at_every_length(length):
    for framework in ("jax", "torch"):
        inputs = written_by_the_policy(5, shape=(5, length))
        expected = gae(*inputs, 0.9, 0.8)
        found = apply(BY_TOKEN["gae"], *inputs, framework=framework, compiled=framework == "jax")
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["gae", "turn_gae", "bootstrapped", "returns_to_go", "whiten"])
@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_garbage_behind_the_mask_changes_nothing(name, framework, garbage):
    clean, dirty = written_by_the_policy(6), written_by_the_policy(6, garbage)
    of = partial(apply, BY_TOKEN[name], framework=framework, compiled=framework == "jax")
    np.testing.assert_array_equal(of(*dirty), of(*clean))


@pytest.mark.parametrize(
    "function, names",
    [
        (lambda r, v, m: gae(r, v, m, gamma=1.5), r"gae\.gamma"),
        (lambda r, v, m: turn_gae(r, v, m, gamma=1.5), r"turn_gae\.gamma"),
        (lambda r, v, m: gae(r, v, m, lam=-0.1), r"gae\.lam"),
        (lambda r, v, m: returns_to_go(r, m, gamma=99), r"returns_to_go\.gamma"),
        (lambda r, v, m: discount_turns(r, float("nan")), r"discount_turns\.gamma"),
    ],
)
def test_a_discount_that_is_none_is_refused_by_name(function, names):
    with pytest.raises(ConfigError, match=names):
        function(*written_by_the_policy(7))
