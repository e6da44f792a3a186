"""The weight of an episode without a trained token in the baseline of its group, for every recipe's advantages."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import recipes
from areal_x.batching.batch import Models, make_batches
from areal_x.errors import function_name
from areal_x.types import Batch, Episode, Group, Scored, Task, Trajectory

ANSWERS = {1.0: 3, 0.25: 1, 3.0: 2}  # reward → number of trained tokens, for each episode that has any
UNTRAINED = -1.0  # the reward of an episode whose only trajectory is all context
WITHOUT = 0.5  # the reward of an episode without a trajectory
GREEDY = 0.75
REWARDS = np.array([*ANSWERS, UNTRAINED, WITHOUT])


def episode(reward: float, answer: int) -> Episode:
    tokens = np.arange(2, 2 + answer, dtype=np.int32)
    logprobs, versions = np.full(answer, -reward, np.float32), np.zeros(answer, np.int32)
    return Episode(Scored(reward), (Trajectory.from_completion(np.array([1], np.int32), tokens, logprobs, versions, reward),))


def group() -> Group:
    scored = [episode(reward, answer) for reward, answer in ANSWERS.items()]
    (context,) = episode(UNTRAINED, 4).trajectories
    untrained = Episode(Scored(UNTRAINED), (replace(context, mask=np.zeros(len(context), np.bool_)),))
    return Group(Task("t", ""), 0, 0, (scored[0], Episode(Scored(WITHOUT)), *scored[1:], untrained), GREEDY)


class Model:
    """A trivial policy, reference and critic."""

    def logprobs(self, batch: Batch) -> np.ndarray:
        return np.asarray(batch.behavior_logp)

    def values(self, batch: Batch) -> np.ndarray:
        return np.zeros(batch.shape, np.float32)


def whitened(rewards: np.ndarray) -> np.ndarray:
    """Whitened rewards of the episodes with tokens, each counted once a token."""
    tokens = np.repeat(rewards, list(ANSWERS.values()))
    return (rewards - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


own = np.array([*ANSWERS])
EXPECTED = {
    "group_relative": (own - REWARDS.mean()) / (REWARDS.std(ddof=1) + 1e-6),
    "group_relative none": own - REWARDS.mean(),
    "group_relative batch": (own - REWARDS.mean()) / (REWARDS.std(ddof=1) + 1e-6),
    "leave_one_out": own - (REWARDS.sum() - own) / 4,
    # The minimum-variance baseline weights an episode by its length, so one without tokens does not count.
    "length_weighted_baseline": own - (own * list(ANSWERS.values())).sum() / sum(ANSWERS.values()),
    "mean_normalized": (own - REWARDS.mean()) / REWARDS.mean(),
    "greedy_baseline": own - GREEDY,
    "whitened_returns": whitened(own),
    "whitened_returns baseline": whitened(own - REWARDS.mean()),
    "whitened_gae": whitened(own),
    "whitened_turn_gae": whitened(own),  # an answer is one turn
}


def key(algorithm: Any) -> str:
    bound = getattr(algorithm.advantages, "keywords", {})
    how = bound.get("scale", "baseline" if bound.get("baseline") else "")
    return f"{function_name(algorithm.advantages)} {how}".strip()


def with_advantages() -> list[Any]:
    made = [recipes.reinforce_pp(baseline=True)]
    for name, function in vars(recipes).items():
        if inspect.isfunction(function) and "parts" in inspect.signature(function).parameters and name != "assemble":
            required = {"max_tokens": 64} if name == "dr_grpo" else {}
            made.append(function(**required))
    return [algorithm for algorithm in made if algorithm.advantages is not None]


def test_every_way_to_compute_advantages_is_tested() -> None:
    assert {key(algorithm) for algorithm in with_advantages()} == set(EXPECTED)


@pytest.mark.parametrize("algorithm", with_advantages(), ids=lambda algorithm: f"{algorithm.name} {key(algorithm)}")
def test_an_episode_without_a_trained_token_counts_with_its_reward(algorithm: Any) -> None:
    algorithm = replace(algorithm, filters=(), shaping=None)
    (batch,) = make_batches([group()], algorithm, 64, Models(Model(), Model(), Model()))  # type: ignore[arg-type]
    found = [batch.advantages[batch.mask & (batch.behavior_logp == -reward)] for reward in ANSWERS]
    assert [len(x) for x in found] == list(ANSWERS.values())
    np.testing.assert_allclose([x[-1] for x in found], EXPECTED[key(algorithm)], atol=1e-5)
    assert np.isfinite(batch.advantages).all()
    assert batch.weights[~batch.mask].max(initial=0) == 0


def test_a_trajectory_without_a_trained_token_takes_nothing_off_its_episodes_reward() -> None:
    """An agent's episode of two trajectories, one of which is all context."""
    first, second = (episode(reward, 2) for reward in (1.0, 0.0))
    context = replace(first.trajectories[0], mask=np.zeros(3, np.bool_))
    groups = [Group(Task("t", ""), 0, 0, (replace(first, trajectories=(*first.trajectories, context)), second))]
    (batch,) = make_batches(groups, recipes.grpo(advantages=plain_difference), 64, Models(Model()))  # type: ignore[arg-type]
    assert sorted(set(batch.advantages[batch.mask].tolist())) == [-0.5, 0.5]


def plain_difference(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


def test_a_step_of_episodes_without_any_token_changes_nothing() -> None:
    groups = [Group(Task("t", ""), 0, 0, (Episode(Scored(1.0)), Episode(Scored(0.0))))]
    for algorithm in (recipes.grpo(), recipes.reinforce_pp(baseline=True), recipes.ppo()):
        (batch,) = make_batches(groups, algorithm, 64, Models(Model(), Model(), Model()))  # type: ignore[arg-type]
        assert not batch.mask.any()
        assert not batch.advantages.any()


def test_a_critic_learns_the_returns_and_not_what_is_whitened() -> None:
    """Without discount, and with values of 0, a token's return is its episode's reward."""
    (batch,) = make_batches([group()], recipes.ppo(), 64, Models(Model(), critic=Model()))  # type: ignore[arg-type]
    np.testing.assert_allclose(batch.returns[batch.mask], -batch.behavior_logp[batch.mask], atol=1e-6)


def test_a_correction_is_given_how_much_likelier_the_anchor_finds_a_token_than_its_sampler() -> None:
    class Further(Model):
        def logprobs(self, batch: Batch) -> np.ndarray:
            return np.where(batch.mask, batch.behavior_logp + 0.5, 7.0).astype(np.float32)

    def exponential(log_ratio: np.ndarray, mask: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        assert (log_ratio[~mask] == 0).all()
        return np.exp(log_ratio)

    corrected, plain = (
        make_batches([group()], recipes.grpo(corrections=correction, proximal="recompute"), 64, Models(Further()))[0]  # type: ignore[arg-type]
        for correction in (exponential, None)
    )
    np.testing.assert_allclose(corrected.weights, plain.weights * np.where(plain.mask, np.exp(0.5), 1), rtol=1e-5)


def test_what_a_length_is_worth_is_asked_of_the_trained_tokens_alone() -> None:
    algorithm = recipes.grpo(advantages=lambda rewards: rewards, shaping=lambda lengths: 10.0 * lengths)
    (batch,) = make_batches([group()], algorithm, 64, Models(Model()))  # type: ignore[arg-type]
    found = [batch.advantages[batch.mask & (batch.behavior_logp == -reward)] for reward in ANSWERS]
    assert [x[0] for x in found] == [reward + 10 * length for reward, length in ANSWERS.items()]
