"""Mistakes in the data and the settings: a clear error where it can be known, else a result that is no NaN."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import corrections, losses, recipes, weighting
from areal_x.algorithms.advantages import gae, group_relative
from areal_x.batching.batch import Models, make_batches
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.monitor.display import panel
from areal_x.protocols.trainer_config import CriticConfig
from areal_x.rollout.episode import run_episode
from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer
from areal_x.types import Batch, Episode, Failed, Group, Policy, Scored, Task, Trajectory
from areal_x.workflows.supervised import Demonstrations
from tests.experiments import TASKS, tiny_experiment
from tests.rollout.fakes import Doing

RECIPES = {
    "grpo": recipes.grpo(kl_coefficient=0.04, entropy_coefficient=0.01),
    "dr_grpo": recipes.dr_grpo(max_tokens=8),
    "dapo": recipes.dapo(max_tokens=8, overlong_buffer=4),
    **{name: getattr(recipes, name)() for name in ("lite_ppo", "gspo", "gmpo", "sapo", "cispo", "rloo", "opo", "remax")},
    "reinforce_pp": recipes.reinforce_pp(reward_kl=0.01, baseline=True),
    "ppo": recipes.ppo(reward_kl=0.01),
    **{name: getattr(recipes, name)() for name in ("m2po", "decoupled_ppo", "dppo", "distill", "sft")},
    "interpolated": recipes.decoupled_ppo(proximal="interpolate"),
    "by group": recipes.grpo(weighting=weighting.group_mean, corrections=partial(corrections.masked, level="sequence")),
}


class ByPosition:
    """Log-probabilities and values that depend on a token's position alone."""

    def logprobs(self, batch: Batch) -> np.ndarray:
        return np.where(batch.segment_ids > 0, -1 - 0.1 * batch.positions, 0).astype(np.float32)

    def values(self, batch: Batch) -> np.ndarray:
        return np.where(batch.segment_ids > 0, 0.1 * batch.positions, 0).astype(np.float32)


def trajectory(*trained: int) -> Trajectory:
    """A trajectory with one token for each of `trained`; 1 means trained on."""
    mask = np.array(trained, bool)
    places = np.arange(len(mask), dtype=np.int32)
    return Trajectory(places, mask, np.where(mask, -0.5, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32))


def group(ticket: int, *episodes: tuple[float, Trajectory]) -> Group:
    made = tuple(Episode(Scored(reward), (trajectory,)) for reward, trajectory in episodes)
    return Group(Task(str(ticket), ""), ticket, 0, made, greedy_reward=0.5)


def learn_from(groups: list[Group], name: str) -> tuple[Batch, np.ndarray]:
    """The batch of the recipe, and the terms of its losses."""
    algorithm = RECIPES[name]
    batch = make_batches(groups, algorithm, 16, Models(ByPosition(), ByPosition(), ByPosition()))[0]  # type: ignore[arg-type]
    said = Policy(logp=ByPosition().logprobs(batch), entropy=np.ones(batch.shape), values=ByPosition().values(batch) + 0.1)
    terms, metrics = algorithm.step_loss()(said, batch)
    for x in metrics.values():
        assert np.isfinite(x).all()
    if algorithm.value_loss is not None:
        terms = terms + algorithm.value_loss(said, batch)[0]
    return batch, terms


USUAL = group(0, (1.0, trajectory(0, 1, 1)), (0.0, trajectory(0, 0, 1, 1, 1)))
ODD = {
    "a group of one": group(1, (1.0, trajectory(0, 1, 1))),
    "a group of equal rewards": group(1, (0.1, trajectory(0, 1)), (0.1, trajectory(0, 1, 1)), (0.1, trajectory(0, 1))),
    "an empty mask": group(1, (1.0, trajectory(0, 0, 0)), (0.0, trajectory(0, 0))),
    "a sequence without a trained token": group(1, (1.0, trajectory(0, 0, 0)), (0.0, trajectory(0, 1))),
    "a sequence of one token": group(1, (1.0, trajectory(1)), (0.0, trajectory(0, 1))),
    "no trajectory": Group(Task("1", ""), 1, 0, (Episode(Scored(1.0), ()), Episode(Scored(0.0), ())), greedy_reward=0.5),
    "nothing scored": Group(Task("1", ""), 1, 0, (Episode(Failed("no")),), greedy_reward=0.5),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("odd", [*ODD, *(f"{odd}, alone" for odd in ODD if odd != "nothing scored")])
def test_nothing_of_a_batch_is_nan_and_what_is_not_trained_on_has_no_weight(name, odd):
    odd, alone = odd.removesuffix(", alone"), odd.endswith(", alone")
    batch, terms = learn_from([ODD[odd]] if alone else [USUAL, ODD[odd]], name)
    for x in (batch.weights, batch.advantages, batch.returns, terms):
        assert x is None or np.isfinite(x).all()
    assert (batch.weights[~batch.mask] == 0).all()
    assert (terms[~batch.mask] == 0).all()
    assert alone or (batch.weights[batch.mask] > 0).any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "lite_ppo", "rloo", "opo"])
@pytest.mark.parametrize("odd", ["a group of one", "a group of equal rewards"])
def test_a_group_that_compares_nothing_has_advantages_of_zero_and_leaves_the_others_theirs(name, odd):
    batch, _ = learn_from([USUAL, ODD[odd]], name)
    usual = np.isin(batch.segment_ids, batch.segment_ids[0, [0]])  # the longest sequence is the usual group's
    assert (batch.advantages[usual & batch.mask] < 0).all()
    own = sum(t.mask.sum() for e in ODD[odd].scored for t in e.trajectories)
    assert ((batch.advantages == 0) & batch.mask).sum() == own


def test_with_nothing_trained_on_a_batch_weighs_nothing():
    batch, terms = learn_from([ODD["an empty mask"]], "grpo")
    assert batch.weights.sum() == 0
    assert (terms == 0).all()


async def answer(task: Task, engine: Any, *, result: Any) -> Any:
    return result


GOOD = trajectory(0, 1)
BAD_TOKEN = replace(GOOD, reward=1.0, token_rewards=np.array([0, np.nan], np.float32))


@pytest.mark.parametrize(
    "result, says",
    [
        *(([replace(GOOD, reward=bad)], r"finite reward") for bad in (np.nan, np.inf, -np.inf, None)),
        *((Episode(Scored(bad), (GOOD,)), r"finite reward") for bad in (np.nan, np.inf, -np.inf)),
        ([BAD_TOKEN], r"token reward"),
        (Episode(Scored(1.0), (BAD_TOKEN,)), r"token reward"),
        (Episode(Scored(1.0), (replace(GOOD, credit=np.array([1, np.inf], np.float32)),)), r"token credits"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_failed_episode_that_says_so(result, says):
    workflow = Doing(partial(answer, result=result))
    episode = asyncio.run(run_episode(workflow, Task("0", ""), None, 60.0))  # type: ignore[arg-type]
    assert isinstance(episode.outcome, Failed)
    assert says in episode.outcome.error
    assert episode.trajectories == ()


def test_episodes_that_are_no_pairs_are_refused_naming_their_task_and_never_paired_with_their_neighbours():
    two = [group(i, (1.0, trajectory(0, 1))) for i in range(2)]
    with pytest.raises(UserError, match=r"task '0' gave 1 trajectories .* compares 2: .*@preference_pairs\(\)"):
        make_batches(two, recipes.dpo(), 16, Models(ByPosition(), ByPosition()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: recipes.grpo(clip_high=-0.1), r"grpo\.clip_high = -0\.1 .* at least 0"),
        (lambda: recipes.grpo(clip_low=float("nan")), r"grpo\.clip_low = nan"),
        (lambda: recipes.gspo(clip_low=-1e-4), r"gspo\.clip_low"),
        (lambda: recipes.gmpo(clip_high=-0.4), r"gmpo\.clip_high"),
        (lambda: recipes.cispo(clip_low=-0.5), r"cispo\.clip_low"),
        (lambda: recipes.cispo(clip_high=-0.5), r"cispo\.clip_high"),
        (lambda: recipes.sapo(tau_negative=0), r"sapo\.tau_negative"),
        (lambda: recipes.dppo(threshold_low=-0.1), r"dppo\.threshold_low"),
        (lambda: recipes.m2po(threshold=-1), r"m2po\.threshold"),
        (lambda: recipes.decoupled_ppo(high=0), r"decoupled_ppo\.high"),
        (lambda: recipes.ppo(lam=1.5), r"ppo\.lam"),
        (lambda: recipes.ppo(value_clip=0), r"ppo\.value_clip"),
        (lambda: recipes.reinforce_pp(gamma=-1), r"reinforce_pp\.gamma"),
        (lambda: recipes.dpo(beta=0), r"dpo\.beta"),
        (lambda: recipes.grpo(loss=partial(losses.ppo_clip, dual_clip=1.0)), r"ppo_clip\.dual_clip = 1\.0 .* greater than 1"),
        (lambda: recipes.grpo(loss=partial(losses.ppo_clip, clip_low=-1.0)), r"ppo_clip\.clip_low"),
        (lambda: recipes.grpo(loss=partial(losses.gspo, clip_low=-1.0)), r"gspo_loss\.clip_low"),
        (lambda: recipes.grpo(loss=partial(losses.gmpo, clip_low=-1.0)), r"gmpo_loss\.clip_low"),
        (lambda: recipes.grpo(loss=partial(losses.sapo, tau_positive=0)), r"sapo_loss\.tau_positive"),
        (lambda: recipes.grpo(loss=partial(losses.cispo, clip_low=-1.0)), r"cispo_loss\.clip_low"),
        (lambda: recipes.grpo(loss=partial(losses.dppo_tv, threshold_high=-1.0)), r"dppo_tv\.threshold_high"),
        (lambda: recipes.ppo(value_loss=partial(losses.value_clip, clip=0.0)), r"value_clip\.clip"),
        (lambda: recipes.dapo(max_tokens=8, overlong_buffer=9), r"overlong_penalty\.buffer"),
        (lambda: recipes.grpo(corrections=partial(corrections.truncated, cap=0.0)), r"truncated\.cap"),
        (lambda: recipes.grpo(corrections=partial(corrections.masked, low=9.0)), r"masked\.low = 9\.0 .* at most masked\.high"),
        (lambda: recipes.grpo(weighting=partial(weighting.constant, length=0)), r"constant\.length"),
        (lambda: recipes.grpo(advantages=partial(group_relative, scale="task")), r"group_relative\.scale"),
        (lambda: recipes.grpo(advantages=partial(gae, gamma=2.0)), r"gae\.gamma"),
    ],
)
def test_numbers_that_cannot_work_are_refused_when_the_recipe_is_made(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: recipes.grpo(loss=partial(losses.kl_penalty, coefficient=0.1)), r"grpo\.loss = 'kl_penalty' .*reference_logp"),
        (
            lambda: recipes.sft(loss=losses.sampled_reverse_kl),
            r"sft\.loss = 'sampled_reverse_kl' .*'reference', 'teacher', 'teachers' or 'self'",
        ),
        (lambda: recipes.grpo(loss=partial(losses.entropy_bonus, coefficient=0.1)), r"entropy, .* needs \(by 'entropy'\)"),
        (lambda: recipes.sft(loss=losses.ppo_clip), r"sft\.loss = 'ppo_clip' .*does not read advantages"),
        (lambda: recipes.grpo(loss=losses.value_clip), r"grpo\.loss = 'value_clip' .*needs \(by 'values'\)"),
        (lambda: recipes.reward_model(loss=losses.sft), r"reward_model\.loss = 'sft' .*head \(by 'policy'\)"),
    ],
)
def test_a_loss_that_reads_what_its_recipe_does_not_pay_for_is_refused_when_the_recipe_is_made(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_loss_of_the_users_own_is_not_called_before_the_run():
    def mine(policy: Policy, batch: Batch) -> losses.LossTerms:
        raise RuntimeError("called")

    assert recipes.grpo(loss=mine).loss is mine


# ---- a real run


@pytest.fixture
def experiment(tiny_model_dir: Path, tmp_path: Path) -> Experiment:
    pytest.importorskip("areal_x_torch")
    return tiny_experiment(tiny_model_dir, tmp_path / "runs", backend="torch")


def poisoned(bad: set[int]) -> Any:
    """Advantages that are infinite at these calls, counted from 1."""
    calls = []

    def advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        calls.append(1)
        return np.asarray(group_relative(rewards, groups)) + (np.inf if len(calls) in bad else 0)

    return advantages


def test_steps_that_are_not_finite_are_skipped_counted_and_shown_and_only_three_in_a_row_end_the_run(experiment, capsys):
    run = replace(experiment, algorithm=recipes.grpo(advantages=poisoned({2, 4, 5})))
    result = run.run()
    assert [row["step"] for row in result.metrics] == list(range(7))
    assert [row["skipped"] for row in result.metrics[1:]] == [0, 1, 0, 1, 1, 0]
    assert [row["loss"] is None for row in result.metrics[1:]] == [False, True, False, True, True, False]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert ["skipped 1" in line for line in shown] == [False, False, True, False, True, True, False]
    assert not (result.directory / "not_finite.jsonl").exists()


def test_three_in_a_row_end_the_run_and_leave_the_last_trajectories(experiment):
    run = replace(experiment, algorithm=recipes.grpo(advantages=poisoned({2, 3, 4, 5, 6})))
    directory = run.open()
    turns = run.turns(directory)
    assert [next(turns).metrics["step"] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"3 steps in a row .* not finite: see .*not_finite\.jsonl"):
        next(turns)
    lines = [json.loads(line) for line in (directory / "not_finite.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4
    assert len({line["task"] for line in lines}) == 2
    for line in lines:
        assert len(line["tokens"]) == len(line["logprobs"]) == len(line["mask"]) == len(line["versions"])
        assert set(line["versions"]) <= {-1, 3}  # of the policy that two skipped steps left as it was


def test_a_step_of_which_a_minibatch_is_finite_is_not_counted_against_the_run(experiment):
    def infinite_for_the_first_group(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return np.where(groups == groups[0], np.inf, group_relative(rewards, groups))

    algorithm = recipes.grpo(advantages=infinite_for_the_first_group)
    run = replace(experiment, algorithm=algorithm, minibatches=2, steps=4)
    assert [turn.metrics["skipped"] for turn in run.turns(run.open()) if turn.groups] == [1] * 4


def test_a_critic_whose_steps_are_not_finite_ends_the_run_too(experiment):
    def value_loss(policy: Policy, batch: Batch) -> losses.LossTerms:
        terms, metrics = losses.value_clip(policy, batch)
        return terms * np.inf, metrics

    run = replace(experiment, algorithm=recipes.ppo(value_loss=value_loss))
    with pytest.raises(UserError, match="3 steps in a row"):
        list(run.turns(run.open()))


def test_the_panel_shows_all_steps_that_were_skipped_so_far():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(panel([{"step": 1, "skipped": 1.0}, {"step": 2, "skipped": 0.0}, {"step": 3, "skipped": 2.0}], 9, 1.0, 0.0))
    assert "skipped 3" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_critic_of_other_tokens_is_refused_at_the_start(experiment, tmp_path):
    other = write_model(tmp_path / "other")
    write_tokenizer(other, CHARACTERS[::-1])
    run = replace(experiment, algorithm=recipes.ppo(), critic=CriticConfig(path=str(other)))
    with pytest.raises(ConfigError, match=r"critic\.path = .* a model with the tokens of"):
        next(run.turns(run.open()))


def test_what_a_step_alone_gives_is_not_asked_of_held_out_data(experiment):
    written = {"workflow": Demonstrations(), "engine": "none", "group_size": 1, "held_out": TASKS}
    replace(experiment, algorithm=recipes.sft(), **written)
    with pytest.raises(ConfigError, match=r"train\.held_out = '10 tasks' .*the loss of sft needs"):
        replace(experiment, algorithm=recipes.sft(entropy_coefficient=0.1), **written)


def test_pairs_that_the_workflow_does_not_give_end_the_run_naming_a_task(experiment):
    written = [replace(task, answer="11") for task in TASKS]
    run = replace(experiment, algorithm=recipes.dpo(), workflow=Demonstrations(), dataset=written, engine="none", group_size=1)
    with pytest.raises(UserError, match=r"task '\d' gave 1 trajectories where the algorithm compares 2"):
        list(run.turns(run.open()))
