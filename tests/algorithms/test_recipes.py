"""A recipe is data whose parts can be replaced."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_x.algorithms import losses, recipes
from areal_x.algorithms.filters import varied
from areal_x.algorithms.recipes import decoupled_ppo, distill, grpo, sft
from areal_x.algorithms.validation import validate_group_size
from areal_x.algorithms.weighting import token_mean
from areal_x.errors import ConfigError
from areal_x.types import Policy
from tests.algorithms.test_losses import make


def test_grpo_with_a_coefficient_adds_the_penalty_and_asks_for_a_reference():
    logp, batch = make()
    plain, penalised = grpo(), grpo(kl_coefficient=0.5)
    assert plain.needs == frozenset()
    assert penalised.needs == {"reference"}
    extra = penalised.loss(Policy(logp=logp), batch)[0] - plain.loss(Policy(logp=logp), batch)[0]
    expected, _ = losses.kl_penalty(Policy(logp=logp), batch, coefficient=0.5)
    np.testing.assert_allclose(extra, expected, atol=1e-12)


def test_any_part_can_be_replaced():
    def my_loss(policy, batch):
        return -policy.logp, {}

    assert grpo(loss=my_loss).loss is my_loss
    assert dataclasses.replace(grpo(), weighting=token_mean).weighting is token_mean
    assert sft().advantages is None


def test_distillation_asks_for_the_teachers_logits_only_with_a_beta_and_brings_the_parts_of_its_rl():
    assert distill().needs == {"teacher"}
    assert distill(beta=0.0).needs == {"teacher_logits"}
    rl = decoupled_ppo(kl_coefficient=0.1, entropy_coefficient=0.01)
    both = distill(beta=0.3, rl=rl, rl_weight=0.5)
    assert both.needs == {"teacher_logits", "reference", "entropy"}
    assert (both.advantages, both.proximal, both.corrections) == (rl.advantages, "recompute", rl.corrections)
    assert both.weighting is token_mean
    assert "divergence: generalized_jsd with beta = 0.3" in both.explain()
    with pytest.raises(ConfigError, match=r"distill\.beta = 1\.5 .* between 0 and 1"):
        distill(beta=1.5)
    with pytest.raises(ConfigError, match=r"distill\.needs = \['entropy', 'reference', 'teacher'\]"):
        distill(rl=rl)  # one model cannot be both


@pytest.mark.parametrize(
    "wrong, names",
    [
        ({"clip_low": -0.1}, r"grpo\.clip_low"),
        ({"proximal": "behaviour"}, "did you mean 'behavior'"),
        ({"kl_coefficient": 1, "kl_estimator": "k4"}, r"grpo\.kl_estimator"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(wrong, names):
    with pytest.raises(ConfigError, match=names):
        grpo(**wrong)


@pytest.mark.parametrize("name", ["grpo", "dapo", "lite_ppo", "gspo", "rloo", "opo", "m2po", "decoupled_ppo"])
def test_a_group_of_one_is_refused_where_attempts_are_compared(name):
    algorithm = getattr(recipes, name)()
    validate_group_size(algorithm, 2)
    with pytest.raises(ConfigError, match=rf"train\.group_size = 1 .* at least 2: {name}"):
        validate_group_size(algorithm, 1)


def test_a_group_of_one_is_enough_where_they_are_not():
    for algorithm in (recipes.reinforce_pp(), recipes.ppo(), recipes.remax(), sft(), recipes.dpo(), distill(rl=grpo())):
        validate_group_size(algorithm, 1)
    with pytest.raises(ConfigError, match="at least 2: reinforce_pp compares"):
        validate_group_size(recipes.reinforce_pp(baseline=True), 1)
    with pytest.raises(ConfigError, match="at least 2: ppo's filter varied"):
        validate_group_size(recipes.ppo(filters=(varied,)), 1)
    validate_group_size(grpo(advantages=lambda rewards: rewards), 1)  # a user's own is not called
