"""What is done with answers that reached the token limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal_x.algorithms import recipes
from areal_x.batching.batch import Models, make_batches
from areal_x.errors import ConfigError
from areal_x.simulation import FakeTrainer
from areal_x.types import Episode, Group, Scored, Task, Trajectory


def answer(length: int, finish_reason: str = "stop") -> Trajectory:
    new = np.full(length, 3, np.int32), np.full(length, -1.0, np.float32), np.zeros(length, np.int32)
    return Trajectory.from_completion(np.array([1, 2], np.int32), *new, finish_reason=finish_reason)


GROUP = Group(
    Task("a", ""),
    ticket=0,
    admitted_version=0,
    episodes=(
        Episode(Scored(1.0), (answer(2),)),
        Episode(Scored(0.0), (answer(5, "length"),)),
        Episode(Scored(0.0), (answer(3),)),
    ),
)


class Critic:
    """A model whose value before each token is 0.25."""

    def values(self, batch):
        return np.full(batch.shape, 0.25, np.float32)


def batch_of(algorithm, group=GROUP):
    (batch,) = make_batches([group], algorithm, 16, Models(FakeTrainer(), critic=Critic()))
    return batch


def test_masked_answers_train_no_token_and_count_in_their_groups_baseline():
    trained, masked = (batch_of(recipes.grpo(truncated=how)) for how in ("train", "mask"))
    assert (trained.mask.sum(), masked.mask.sum()) == (10, 5)
    assert trained.weights.sum() == pytest.approx(1)
    assert masked.weights.sum() == pytest.approx(1)  # two sequences, and not three with one of nothing
    np.testing.assert_array_equal(masked.advantages[masked.mask], trained.advantages[masked.mask])
    assert (masked.weights[trained.mask & ~masked.mask] == 0).all()
    nothing = replace(GROUP, episodes=GROUP.episodes[1:2])
    assert batch_of(recipes.grpo(truncated="mask"), nothing).weights.sum() == 0


@pytest.mark.parametrize("recipe", [recipes.ppo, recipes.turn_ppo])
def test_a_bootstrapped_answer_earns_the_critics_value_at_its_end(recipe):
    plain, bootstrapped = (batch_of(recipe(gamma=1.0, lam=1.0, truncated=how)) for how in ("train", "bootstrap"))
    gained = (bootstrapped.returns - plain.returns)[plain.mask]
    by_length = {0.0: 2 + 3, 0.25: 5}
    assert {float(x): int((gained == x).sum()) for x in np.unique(gained)} == by_length


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
def test_only_a_critic_can_bootstrap(name):
    with pytest.raises(ConfigError, match=rf"{name}\.truncated = 'bootstrap' .* only advantages of a critic"):
        getattr(recipes, name)(truncated="bootstrap")
    with pytest.raises(ConfigError, match=rf"{name}\.truncated = 'drop'"):
        getattr(recipes, name)(truncated="drop")
