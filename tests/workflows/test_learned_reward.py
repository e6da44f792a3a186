"""Rewards from a reward model, compared with transformers' own classifier."""

import asyncio
import shutil
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.preflight.model import check_other_models, find_model, other_models
from areal_x.rollout.episode import run_episode
from areal_x.rollout.episodes import EpisodeEngine
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.testing.models import CHARACTERS, write_tokenizer
from areal_x.types import Failed, Scored, Task, Trajectory
from areal_x.workflows.learned_reward import LearnedReward
from tests.experiments import tiny_experiment
from tests.rollout.fakes import Doing, FakeEngine, Plain

SIZES = {
    "model_type": "qwen3",
    "vocab_size": 44,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_labels": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def classifier():
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**SIZES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def classifier_dir(classifier, tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    classifier.save_pretrained(directory)
    return str(directory)


def episodes(workflow, count):
    """The episodes of this many concurrent attempts, each with another seed."""

    async def all_of_them():
        ready = workflow.setup(None)
        try:
            return await asyncio.gather(*(ready.run(Task(str(i), ""), Seeded(i)) for i in range(count)))
        finally:
            await ready.close()

    return asyncio.run(all_of_them())


class Seeded(FakeEngine):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    async def generate(self, request):
        return await super().generate(replace(request, seed=self.seed))


def test_an_answer_is_worth_what_transformers_says_of_the_whole_sequence(classifier, classifier_dir, backend):
    import torch

    made = episodes(LearnedReward(Plain(), classifier_dir, backend, row_length=32), 20)
    for episode in made:
        (trajectory,) = episode.trajectories
        with torch.no_grad():
            score = classifier(torch.tensor(trajectory.tokens[None]).long()).logits.item()
        assert trajectory.reward == episode.outcome.reward == pytest.approx(score, abs=1e-4)
        assert episode.outcome.details == {"verified": float(trajectory.tokens[3])}
    assert np.std([episode.outcome.reward for episode in made]) > 0.1


def test_what_failed_is_not_judged(classifier_dir):
    async def fails(task, engine):
        return Failed("no answer")

    assert [e.outcome for e in episodes(LearnedReward(Doing(fails), classifier_dir, "jax"), 2)] == [Failed("no answer")] * 2


def test_an_answer_that_is_too_long_for_the_reward_fails_alone(classifier_dir):
    async def one_is_long(task, engine):
        tokens = np.arange(2, 10 if task.id == "1" else 9, dtype=np.int32)
        return [Trajectory.from_completion(tokens[:1], tokens[1:], np.zeros(len(tokens) - 1), np.zeros(len(tokens) - 1), 1.0)]

    async def all_of_them():
        workflow = LearnedReward(Doing(one_is_long), classifier_dir, "jax", row_length=7).setup(None)
        try:
            return await asyncio.gather(*(run_episode(workflow, Task(str(i), ""), None, None) for i in range(3)))
        finally:
            await workflow.close()

    outcomes = [episode.outcome for episode in asyncio.run(all_of_them())]
    assert [type(outcome) for outcome in outcomes] == [Scored, Failed, Scored]
    assert "8 tokens is longer than learned_reward.row_length = 7" in outcomes[1].error


def test_held_out_tasks_are_judged_by_the_workflow_itself():
    workflow = Plain()
    greedy = LearnedReward(workflow, "nowhere").greedy()
    assert isinstance(greedy, Plain)
    assert greedy.sampling.temperature == 0


def test_a_greedy_answer_that_others_are_compared_with_is_judged_by_the_same_model(classifier_dir):
    """ReMax takes the reward of the greedy answer off the others', so both must be the reward model's."""
    workflow = LearnedReward(Plain(), classifier_dir, "jax", row_length=32).setup(None)

    async def one_group():
        runner = Runner(
            FakeEngine(), workflow, TaskStream([Task("t", "")]), TrajectoryQueue(1, 0), group_size=2, greedy=True, seed=3
        )
        runner.begin(0)
        running = asyncio.create_task(runner.run())
        try:
            (group,) = await runner.take()
            greedy = await run_episode(runner.workflow.baseline(), group.task, view(), None)
            return group, greedy
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await workflow.close()

    def view():
        return EpisodeEngine(FakeEngine(), (3, 0, 0, 2), lambda _: None, lambda _: None)

    group, greedy = asyncio.run(one_group())
    assert workflow.baseline().workflow.sampling.temperature == 0
    assert greedy.outcome.details == {"verified": float(greedy.trajectories[0].tokens[3])}
    assert group.greedy_reward == pytest.approx(greedy.outcome.reward, abs=1e-5)
    assert abs(group.greedy_reward - greedy.outcome.details["verified"]) > 0.5


def test_a_language_model_gives_no_rewards(tiny_model_dir):
    with pytest.raises(ConfigError, match=r"learned_reward\.path .* a model with a score head"):
        LearnedReward(Plain(), str(tiny_model_dir)).setup(None)


def test_the_run_samples_as_the_workflow_says():
    assert LearnedReward(Plain(), "nowhere").sampling_params() == Plain().sampling


def with_tokens(classifier_dir, directory, characters=CHARACTERS):
    shutil.copytree(classifier_dir, directory)
    write_tokenizer(directory, characters)
    return str(directory)


def test_a_reward_model_of_other_tokens_is_refused_and_one_of_the_policys_is_not(classifier_dir, tiny_model_dir, tmp_path):
    tokenizer = load_tokenizer(tiny_model_dir)
    LearnedReward(Plain(), with_tokens(classifier_dir, tmp_path / "same"), "jax").find(tokenizer)
    other = with_tokens(classifier_dir, tmp_path / "other", CHARACTERS[::-1])
    with pytest.raises(ConfigError, match=r"learned_reward\.path = .*other.* a model with the tokens of the policy"):
        LearnedReward(Plain(), other, "jax").setup(tokenizer)
    with pytest.raises(UserError, match="has no tokenizer"):
        LearnedReward(Plain(), classifier_dir, "jax").setup(tokenizer)


def test_check_names_a_reward_model_of_other_tokens(classifier_dir, tiny_model_dir, tmp_path):
    run = tiny_experiment(tiny_model_dir, tmp_path / "runs")
    model, tokenizer = find_model(str(tiny_model_dir)), load_tokenizer(tiny_model_dir)
    assert other_models(run) == {}
    paths = {
        name: with_tokens(classifier_dir, tmp_path / name, of) for name, of in (("a", CHARACTERS), ("b", CHARACTERS[::-1]))
    }
    judged = {name: replace(run, workflow=LearnedReward(run.workflow, path)) for name, path in paths.items()}
    assert check_other_models(judged["a"], model, tokenizer) == "the policy's tokens: learned_reward.path"
    with pytest.raises(ConfigError, match=r"learned_reward\.path"):
        check_other_models(judged["b"], model, tokenizer)


class Shown(LearnedReward):
    """Notes who computes the reward model."""

    seen: ClassVar[list[str]] = []

    def setup(self, tokenizer):
        ready = super().setup(tokenizer)
        self.seen.append(type(ready.reward_model._model).__module__)
        return ready


def test_a_reward_model_is_computed_by_the_backend_of_the_run(classifier_dir, tiny_model_dir, tmp_path, backend):
    path = with_tokens(classifier_dir, tmp_path / "judge")
    run = tiny_experiment(tiny_model_dir, tmp_path / "runs", backend=backend, steps=1)
    run = replace(run, workflow=Shown(run.workflow, path, row_length=32))
    Shown.seen.clear()
    turns = run.turns(run.open())
    next(turns)
    turns.close()
    assert Shown.seen == [f"areal_x_{backend}.trainer"]
    assert LearnedReward(run.workflow, path, "torch").computed_by("jax").backend == "torch"
