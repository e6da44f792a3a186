"""The proximal policy of a step's own forward pass is, to every loss and correction, the one that a pass before it computes."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import corrections, recipes
from areal_x.algorithms.algorithm import Algorithm
from tests.algorithms.frameworks import example, loss_and_gradient

CORRECTIONS: tuple[Any, ...] = (
    None,
    corrections.importance,
    partial(corrections.truncated, level="sequence"),
    partial(corrections.masked, low=0.8, high=1.3, level="geometric"),
)


def algorithms() -> list[Algorithm]:
    """Every recipe that trains a policy, with one correction after the other; m2po with none of its own."""
    made = []
    for name, recipe in vars(recipes).items():
        if not inspect.isfunction(recipe) or "parts" not in inspect.signature(recipe).parameters or name == "assemble":
            continue
        if name != "reward_model":
            correction = CORRECTIONS[len(made) % len(CORRECTIONS)]
            sizes = {"max_tokens": 6} if name == "dr_grpo" else {}
            made.append(recipe(**sizes, entropy_coefficient=0.1, proximal="recompute", corrections=correction))
    return [*made, replace(recipes.distill(beta=0.5, rl=recipes.decoupled_ppo()), name="distill and decoupled_ppo")]


MADE = {algorithm.name: algorithm for algorithm in algorithms()}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", MADE)
def test_terms_and_gradients_are_those_around_a_pass_before_the_step(name: str, framework: str) -> None:
    algorithm = MADE[name]
    assert algorithm.uses_own_pass()
    policy, batch = example()
    weights = batch.weights
    if algorithm.corrections is not None:
        log_ratio = np.where(batch.mask, policy.logp - batch.behavior_logp, 0)
        weights = weights * algorithm.corrections(log_ratio, batch.mask, batch.segment_ids)
    before = batch.replace(proximal_logp=policy.logp, weights=weights)
    value, gradient = loss_and_gradient(algorithm.step_loss(), policy, before, framework=framework)
    for garbage in (None, np.nan):
        policy, batch = example(garbage=garbage)
        own = batch.replace(proximal_logp=None)
        found, of_own = loss_and_gradient(algorithm.step_loss(own_pass=True), policy, own, framework=framework)
        assert found == pytest.approx(value, rel=1e-12)
        for array, x in gradient.items():
            np.testing.assert_allclose(of_own[array], x, rtol=1e-11, atol=1e-14, err_msg=array)
    assert any(np.abs(x).max() > 0 for x in gradient.values())


def test_only_a_step_that_must_know_more_before_it_begins_takes_a_pass_before_it() -> None:
    def own(log_ratio: Any, mask: Any, segment_ids: Any) -> Any:
        return mask * 1.0

    for name, recipe in {"grpo": recipes.grpo, "decoupled_ppo": recipes.decoupled_ppo}.items():
        algorithm = recipe(proximal="recompute")
        assert algorithm.uses_own_pass(1), name
        assert not algorithm.uses_own_pass(2)
        assert algorithm.extra_pass(2) == "of the 2 optimizer steps on a batch, the first changes the policy"
        interpolated = recipe(proximal="interpolate")
        assert (interpolated.uses_own_pass(), interpolated.extra_pass(2)) == (False, "")
    assert (recipes.grpo().uses_own_pass(), recipes.grpo().extra_pass(2)) == (False, "")
    reasons = {
        recipes.m2po(): "importance_of_trusted looks at all sequences of an optimizer step together",
        recipes.dapo(corrections=partial(corrections.second_moment, threshold=0.1)): "second_moment looks at all",
        recipes.grpo(corrections=own): "own, which is no part of AReaL-X, is called with numpy arrays",
        recipes.grpo(corrections=partial(own)): "own, which is no part of AReaL-X",
    }
    for algorithm, reason in reasons.items():
        assert not algorithm.uses_own_pass()
        assert algorithm.extra_pass().startswith(reason)
        assert f"forward pass before the step: {reason}" in algorithm.explain()
    assert "forward pass before the step: only with several train.minibatches" in recipes.decoupled_ppo().explain()
    assert "forward pass" not in recipes.grpo().explain()


def test_the_loss_travels_to_the_processes_of_a_gang() -> None:
    loss = recipes.decoupled_ppo().step_loss(own_pass=True)
    policy, batch = example()
    here, there = (each(policy, batch)[0] for each in (loss, pickle.loads(pickle.dumps(loss))))
    np.testing.assert_array_equal(here, there)
