"""A recipe is data whose parts can be replaced."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.recipes import grpo, sft
from areal_x.algorithms.weighting import token_mean
from areal_x.errors import ConfigError
from areal_x.types import Policy
from tests.algorithms.test_losses import make


def test_grpo_with_a_coefficient_adds_the_penalty_and_asks_for_a_reference():
    theta, batch = make()
    plain, penalised = grpo(), grpo(kl_coefficient=0.5)
    assert plain.needs == frozenset()
    assert penalised.needs == {"reference"}
    extra = penalised.loss(Policy(logp=theta), batch)[0] - plain.loss(Policy(logp=theta), batch)[0]
    expected, _ = losses.kl_penalty(Policy(logp=theta), batch, coefficient=0.5)
    np.testing.assert_allclose(extra, expected, atol=1e-12)


def test_any_part_can_be_replaced():
    def my_loss(policy, batch):
        return -policy.logp, {}

    assert grpo(loss=my_loss).loss is my_loss
    assert dataclasses.replace(grpo(), weighting=token_mean).weighting is token_mean
    assert sft().advantages is None


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
