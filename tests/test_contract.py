"""The names that programs outside this repository call answer, with their parameters and defaults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest

# module: functions with their parameters as a caller writes them
FUNCTIONS = {
    "areal_x.trainer": ["create_trainer(backend, config)"],
    "areal_x.algorithms.weighting": [
        "token_mean(mask, segment_ids)",
        "sequence_mean(mask, segment_ids)",
        "sequence_sum(mask, segment_ids)",
        "constant(mask, segment_ids, length)",
        "group_mean(mask, segment_ids, groups_of_segments)",
    ],
    "areal_x.algorithms.advantages": [
        "group_relative(rewards, groups, scale='group', eps=1e-06)",
        "leave_one_out(rewards, groups)",
        "gae(rewards, values, mask, gamma=1.0, lam=1.0)",
        "returns_to_go(rewards, mask, gamma=1.0)",
        "whiten(advantages, mask, eps=1e-08)",
        "length_weighted_baseline(rewards, lengths, groups)",
        "greedy_baseline(rewards, greedy_rewards)",
        "discount_turns(turn_rewards, gamma)",
    ],
    "areal_x.rewards.shaping": ["overlong_penalty(length, max_length, buffer, scale=1.0)"],
    "areal_x.algorithms.losses": [
        "reinforce(policy, batch)",
        "ppo_clip(policy, batch, clip_low=0.2, clip_high=0.2, dual_clip=None)",
        "gspo(policy, batch, clip_low=0.0003, clip_high=0.0004)",
        "gmpo(policy, batch, clip_low=0.4, clip_high=0.4)",
        "sapo(policy, batch, tau_positive=1.0, tau_negative=1.05)",
        "cispo(policy, batch, clip_high=0.28, clip_low=None)",
        "dro(policy, batch, beta=0.05)",
        "dppo_tv(policy, batch, threshold_low=0.15, threshold_high=0.15)",
        "kpop(policy, batch, threshold=0.1)",
        "value_clip(policy, batch, clip=0.2)",
        "kl_penalty(policy, batch, coefficient, estimator='k3')",
        "entropy_bonus(policy, batch, coefficient)",
        "sft(policy, batch)",
        "sampled_reverse_kl(policy, batch)",
    ],
    "areal_x.algorithms.kl": ["k1(logp, ref)", "k2(logp, ref)", "k3(logp, ref)"],
    "areal_x.algorithms.distillation": ["generalized_jsd(student_logits, teacher_logits, beta)"],
    "areal_x.algorithms.preferences": [
        "dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)",
        "ipo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)",
        "bradley_terry(chosen_rewards, rejected_rewards)",
    ],
    "areal_x.algorithms.corrections": [
        "importance(log_ratio, mask, segment_ids, level='token')",
        "truncated(log_ratio, mask, segment_ids, cap=2.0, level='token')",
        "masked(log_ratio, mask, segment_ids, low=None, high=5.0, level='token', reweight=True)",
        "second_moment(log_ratio, mask, segment_ids, threshold=0.04)",
    ],
    "areal_x.algorithms.proximal": ["interpolate(logp, behavior_logp, versions, version)"],
}
RECIPES = (
    *("grpo", "dr_grpo", "dapo", "lite_ppo", "gspo", "gmpo", "sapo", "cispo", "rloo", "reinforce_pp", "ppo", "m2po"),
    *("decoupled_ppo", "dppo", "opo", "remax", "distill", "sft", "dpo", "ipo", "reward_model"),
    *("icepop", "kpop", "maxrl", "turn_ppo", "self_distill", "multi_distill"),
)
FIELDS = {
    "Task": "id prompt answer metadata",
    "Trajectory": "tokens mask logprobs versions reward token_rewards",
    "Scored": "reward details",
    "Failed": "error",
    "TimedOut": "seconds",
    "Episode": "outcome trajectories",
    "Group": "task ticket admitted_version episodes",
    "Batch": "tokens segment_ids positions mask behavior_logp proximal_logp reference_logp versions advantages returns weights",
    "Policy": "logp entropy values",
}


def written(function: object) -> str:
    """A signature without annotations, kinds and gin's wrapper."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()  # type: ignore[arg-type]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("module, call", [(module, call) for module, calls in FUNCTIONS.items() for call in calls])
def test_a_function_is_called_as_ever(module, call):
    name, _, parameters = call.partition("(")
    assert written(getattr(importlib.import_module(module), name)) == parameters.removesuffix(")")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_an_algorithm_that_explains_itself(name):
    recipe = getattr(importlib.import_module("areal_x.algorithms.recipes"), name)
    needed = {"max_tokens": 64} if "max_tokens" in inspect.signature(recipe).parameters else {}
    assert name in recipe(**needed).explain()


@pytest.mark.parametrize("name", FIELDS)
def test_a_noun_has_its_fields(name):
    cls = getattr(importlib.import_module("areal_x.types"), name)
    assert set(FIELDS[name].split()) <= {f.name for f in dataclasses.fields(cls)}


def test_losses_add():
    from areal_x.algorithms import losses

    assert callable(losses.combine(losses.reinforce, losses.sft))


@pytest.mark.parametrize(
    "module, names",
    [
        ("areal_x.trainer", "Trainer TrainerConfig ModelConfig OptimizerConfig MeshConfig LoRAConfig Scorer find_backend"),
        ("areal_x.experiment", "Experiment"),
        ("areal_x.agents", "session Session"),
        ("areal_x.rollout.queue", "TrajectoryQueue"),
    ],
)
def test_other_names_are_there(module, names):
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_the_trainers_contract_has_its_methods():
    from areal_x.trainer import Trainer

    assert {"logprobs", "update", "weights", "save", "restore"} <= set(vars(Trainer)) | {"logprobs"}


@pytest.mark.parametrize("command", ["train", "check", "plan", "replay", "serve", "export"])
def test_each_command_is_a_module(command):
    done = subprocess.run([sys.executable, "-m", f"areal_x.{command}", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")
