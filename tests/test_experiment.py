"""The ring as a whole, on a tiny model with the embedded engine: what it promises, not how well it learns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_x.algorithms.recipes import grpo
from areal_x.batching.batch import Models
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.protocols.workflow import DECLARED, Workflow
from areal_x.run import checkpoint
from areal_x.run.journal import FILE, Journal
from areal_x.types import Task
from areal_x.workflows.learned_reward import LearnedReward
from tests.experiments import TASKS, TRUNCATED, tiny_experiment
from tests.run.test_journal import limited

SERVED = {"engine": "vllm"}
ON_TORCH = VLLMConfig(transport="nccl", devices=("1",))


class Wrapping(Workflow):
    """A workflow around another that counts no prompts before the episode."""

    def __init__(self, workflow):
        self.workflow = workflow

    def wrapped(self):
        return self.workflow

    def sampling_params(self):
        return self.workflow.sampling_params()

    def setup(self, tokenizer):
        return Wrapping(self.workflow.setup(tokenizer))

    def greedy(self):
        return self.workflow.greedy()

    async def run(self, task, engine):
        return await self.workflow.run(task, engine)

    async def close(self):
        await self.workflow.close()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """torch, which compiles nothing, unless a test says otherwise: the ring is the same around both."""
    backend = getattr(request, "param", "torch")
    pytest.importorskip(f"areal_x_{backend}")
    return backend


on_jax = pytest.mark.parametrize("backend", ["jax"], indirect=True)


@pytest.fixture
def experiment(backend: str, tiny_model_dir: Path, tmp_path: Path) -> Experiment:
    return tiny_experiment(tiny_model_dir, tmp_path / "runs", backend=backend, held_out=TASKS[:5], name="ring")


def final_weights(run: Path, step: int) -> dict[str, np.ndarray]:
    return dict(model_dir.read_tensors(run / "checkpoints" / str(step) / "trainer"))


@on_jax
def test_a_run_leaves_metrics_a_plot_and_a_model_that_transformers_loads(experiment):
    result = experiment.run()
    assert [row["step"] for row in result.metrics] == list(range(7))
    assert "accuracy" in result.metrics[0]
    assert "accuracy" in result.metrics[-1]
    for row in result.metrics[1:]:
        assert np.isfinite([row["loss"], row["grad_norm"], row["reward"], row["reward/length"]]).all()
        assert row["seconds"] == pytest.approx(sum(row[f"{lap}_seconds"] for lap in ("wait", "logprob", "update", "publish")))
    assert result.metrics[-1]["scored"] >= 6 * 8
    assert (result.directory / "plot.png").stat().st_size > 0
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    transformers.AutoModelForCausalLM.from_pretrained(result.directory / "checkpoints" / "6" / "trainer")


def test_on_policy_engine_and_trainer_agree_on_every_token(experiment):
    for turn in experiment.turns(experiment.open()):
        if turn.groups:
            assert turn.metrics["policy_gap"] <= 1e-4
            assert turn.metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
            assert (turn.batch.versions[turn.batch.mask] == turn.metrics["step"] - 1).all()


@pytest.mark.parametrize("backend", ["jax", "torch"], indirect=True)
def test_on_policy_engine_and_trainer_agree_on_every_token_that_truncated_sampling_drew(experiment):
    """The reference too is of the kept tokens alone: at the first step it is the policy."""
    of_all = replace(experiment, workflow=TRUNCATED, algorithm=grpo(kl_coefficient=0.1, entropy_coefficient=0.01))
    turns = [turn for turn in of_all.turns(of_all.open()) if turn.groups]
    for turn in turns:
        assert turn.batch.kept is not None
        assert 1 < turn.metrics["kept_tokens"] <= 20
        assert turn.metrics["policy_gap"] <= 1e-5
        assert turn.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert turn.metrics["entropy"] <= np.log(20)
    assert turns[0].metrics["reference_kl"] <= 1e-6


@pytest.mark.parametrize("window", [1, 2])
def test_no_group_is_older_than_the_bound_when_it_is_trained_on(experiment, window):
    stale = replace(experiment, max_staleness=2, window=window)
    bound = (3 * stale.groups_per_step + window - 2) // stale.groups_per_step
    ages = [
        int(turn.metrics["step"]) - 1 - group.admitted_version for turn in stale.turns(stale.open()) for group in turn.groups
    ]
    assert max(ages) <= bound
    assert max(ages) >= 1  # the rollout did run ahead


@on_jax
def test_a_run_that_is_stopped_and_resumed_ends_where_an_unbroken_one_does(experiment):
    whole = replace(experiment, name="whole").run()
    first = replace(experiment, name="parts", checkpoint_every=2)
    for turn in first.turns(first.open()):
        if turn.metrics["step"] == 5:
            break  # between checkpoints: step 5 is lost and taken again
    resumed = first.run(resume=True)
    rows = [json.loads(line) for line in (resumed.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    for key in ("reward", "response_length", "trained_tokens"):  # the same tasks, drawn the same way
        assert [row[key] for row in rows[1:]] == [row[key] for row in whole.metrics[1:]]
    one, other = final_weights(whole.directory, 6), final_weights(resumed.directory, 6)
    # Not to the bit: which requests share a decoding step depends on when each arrives, and that moves the last bits of their
    # log-probabilities. AdamW divides by the size of a gradient, so where that is nearly 0 its steps of 1e-3 keep those bits.
    assert np.mean([np.abs(one[name] - other[name]).mean() for name in one]) < 1e-5


def test_as_many_steps_are_taken_when_minibatches_change_at_a_resume(experiment):
    taken = []
    for minibatches, until in ((2, 3), (1, 5), (2, 6)):
        changed = replace(experiment, minibatches=minibatches, checkpoint_every=2, keep_checkpoints=9)
        for turn in changed.turns(changed.open(resume=bool(taken)), resume=bool(taken)):
            taken.append(turn.metrics["step"])
            if taken[-1] == until:
                break
    assert taken == [0, 1, 2, 3, 3, 4, 5, 5, 6]
    assert checkpoint.steps(Path(experiment.runs) / "ring") == [2, 4, 6]


def test_a_checkpoint_is_written_after_all_that_it_depends_on_is_on_the_disk(experiment, monkeypatch, tmp_path):
    """The main file of the journal, without SQLite's log, is enough to continue from the checkpoint."""
    save, seen = checkpoint.Saver.save, []

    def save_noted(saver, step, write, state):
        (tmp_path / str(step)).mkdir()
        shutil.copy(Path(experiment.runs) / "ring" / FILE, tmp_path / str(step) / FILE)
        with Journal(tmp_path / str(step)) as journal:
            seen.append((step, journal.steps()))
        save(saver, step, write, state)

    monkeypatch.setattr(checkpoint.Saver, "save", save_noted)
    replace(experiment, checkpoint_every=2).run()
    assert seen == [(step, list(range(1, step + 1))) for step in (2, 4, 6)]


def test_a_journal_that_cannot_be_written_ends_the_run_in_a_sentence(experiment, monkeypatch):
    limited(5, monkeypatch)
    with pytest.raises(UserError, match=r"the journal .* could not be written \(database or disk is full\)"):
        experiment.run()


def test_what_a_workflow_keeps_goes_on_from_the_checkpoint(experiment):
    class Remembering(Wrapping):
        """Counts the episodes of the workflow inside it."""

        def __init__(self, workflow, seen):
            super().__init__(workflow)
            self.seen = seen

        def setup(self, tokenizer):
            return Remembering(self.workflow.setup(tokenizer), self.seen)

        def state(self):
            return {"seen": len(self.seen)}

        def restore(self, state):
            self.seen.append(state)

        async def run(self, task, engine):
            self.seen.append(task.id)
            return await super().run(task, engine)

    seen, later = [], []
    first = replace(experiment, workflow=Remembering(experiment.workflow, seen), checkpoint_every=2, name="remembered")
    for turn in first.turns(first.open()):
        if turn.metrics["step"] == 3:
            break
    replace(first, workflow=Remembering(experiment.workflow, later)).run(resume=True)
    assert 0 < later[0]["seen"] <= len(seen)
    assert len(later) > 1


def test_resuming_runs_again_what_was_in_flight_and_consumes_every_task_once(experiment):
    stale = replace(experiment, max_staleness=2, steps=10, checkpoint_every=4, name="stale")
    consumed: dict[int, list[str]] = {}
    for turn in stale.turns(stale.open()):
        consumed[int(turn.metrics["step"])] = [group.task.id for group in turn.groups]
        if turn.metrics["step"] == 6:
            break
    for turn in stale.turns(stale.open(resume=True), resume=True):
        consumed[int(turn.metrics["step"])] = [group.task.id for group in turn.groups]
    tasks = [task for step in sorted(consumed) for task in consumed[step]]
    for epoch in range(2):  # 10 tasks, 2 a step
        assert sorted(tasks[10 * epoch : 10 * (epoch + 1)]) == sorted(task.id for task in TASKS)


def test_a_steps_metrics_are_the_means_over_its_minibatches_and_skips_are_counted(experiment):
    said = iter([{"loss": 1.0, "ratio": 2.0, "skipped": 0.0}, {"loss": 4.0, "ratio": 2.5, "skipped": 1.0}])
    policy = SimpleNamespace(update=lambda batch, loss: next(said))
    row = experiment.learn([None, None], Models(policy), None)
    assert row == {"loss": 2.5, "ratio": 2.25, "skipped": 1.0}


def test_a_penalty_to_the_reference_starts_at_zero_and_grows(experiment):
    penalised = replace(experiment, algorithm=grpo(kl_coefficient=0.1))
    kl = [turn.metrics["reference_kl"] for turn in penalised.turns(penalised.open()) if turn.groups]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-5


def test_a_recomputed_proximal_policy_is_the_trainers_own(experiment):
    recomputed = replace(experiment, algorithm=grpo(proximal="recompute"), max_staleness=2)
    for turn in recomputed.turns(recomputed.open()):
        if turn.groups:
            assert turn.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)  # before the step, the policy is the proximal one


def test_groups_that_a_filter_refuses_are_replaced_and_counted(experiment):
    def even(group):
        return int(group.task.id) % 2 == 0

    picky = replace(experiment, algorithm=replace(grpo(), filters=(even,)))
    turns = [turn for turn in picky.turns(picky.open()) if turn.groups]
    assert all(even(group) for turn in turns for group in turn.groups)
    assert turns[-1].metrics["given_back"] > 0


def test_tasks_with_long_prompts_are_left_out_and_the_run_goes_on_and_resumes(experiment):
    experiment = replace(experiment, dataset=[*TASKS[:3], Task("long", "1" * 40)], checkpoint_every=2, held_out=())
    said, ids = [], []
    for turn in experiment.turns(experiment.open(), message=said.append):
        ids += [group.task.id for group in turn.groups]
        if turn.metrics["step"] == 3:
            break
    for turn in experiment.turns(experiment.open(resume=True), resume=True, message=said.append):
        ids += [group.task.id for group in turn.groups]
    sentence = "1 of 4 tasks have prompts longer than 24 tokens and are left out (train.longest_prompt)"
    assert said.count(sentence) == 2
    assert len(ids) == 2 * 3 + 2 * 4
    assert "long" not in ids
    assert turn.metrics["left_out"] > 0


def test_a_prompt_that_only_its_episode_finds_too_long_is_a_failed_episode(experiment):
    """As an agent's may be: the wrapped workflow does not count its prompts before the episode."""
    tasks = [*TASKS[:3], Task("long", "1" * 40)]
    hidden = replace(experiment, dataset=tasks, workflow=Wrapping(experiment.workflow), held_out=tasks, steps=3)
    for turn in hidden.turns(hidden.open()):
        assert all(group.task.id != "long" for group in turn.groups)
    assert turn.metrics["failed"] > 0
    assert turn.metrics["evaluation_failed"] == 1
    assert turn.metrics["accuracy"] >= 0


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"backend": "jaks"}, r"train\.backend = 'jaks' .*jax"),
        ({"engine": "vlm"}, "did you mean 'vllm'"),
        ({"max_staleness": -1}, r"train\.max_staleness = -1 .* at least 0"),
        ({"embedded": EmbeddedConfig(context=64)}, r"embedded\.context = 64 .* train\.row_length = 32"),
        ({"loggers": ("wand",)}, "did you mean 'wandb'"),
        (
            {"trainer": TrainerConfig(replay_experts=True), "engine": "vllm", "vllm": VLLMConfig(pipeline=2)},
            r"vllm\.pipeline = 2 .* 1 with trainer\.replay_experts: vLLM returns the experts of the last stage",
        ),
        ({"trainer": TrainerConfig(replay_experts=True)}, r"trainer\.replay_experts = True .*'embedded', which records no"),
        ({"colocate": True}, r"train\.colocate = True .* False with train\.engine = 'embedded', which has no servers"),
        (
            {"colocate": True, **SERVED, "vllm": VLLMConfig(urls=("http://localhost:1",))},
            r"False with vllm\.urls: only servers",
        ),
        ({"colocate": True, **SERVED, "cluster": "ray"}, r"False with train\.cluster = 'ray'"),
        ({"colocate": True, **SERVED, "vllm": ON_TORCH, "backend": "torch"}, r"False with vllm\.transport = 'nccl'"),
        ({"colocate": True, **SERVED, "serving": True}, r"False where a model is served"),
        ({"evaluation": object()}, r"train\.evaluation = <class 'object'> .* subclass of areal_x\.Workflow"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_built(experiment, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(experiment, **changes)


def test_a_workflow_that_lacks_declared_methods_is_refused_by_their_names(experiment):
    class Forwarding:
        """Forwards what it lacks: the run would call `setup` of the workflow inside, and lose this one."""

        def __init__(self, workflow):
            self.workflow = workflow

        def __getattr__(self, name):
            return getattr(self.workflow, name)

        async def run(self, task, engine):
            return await self.workflow.run(task, engine)

    wanted = ", ".join(name for name in DECLARED if name != "run")
    refused = r"train\.workflow = .*Forwarding.* a subclass of areal_x\.Workflow, which provides"
    for workflow in (Forwarding(experiment.workflow), LearnedReward(Forwarding(experiment.workflow), "judge")):
        with pytest.raises(ConfigError, match=refused) as error:
            replace(experiment, workflow=workflow)
        assert f"provides {wanted}" in str(error.value)


def test_a_workflow_of_another_class_with_all_declared_methods_is_accepted(experiment):
    complete = type("Complete", (), {name: getattr(type(experiment.workflow), name) for name in DECLARED})
    complete.sampling = experiment.workflow.sampling
    replace(experiment, workflow=complete())


def test_trainers_that_cannot_leave_their_devices_are_refused_by_their_names():
    with pytest.raises(UserError, match=r"train\.colocate = True .* the policy of this backend \(SimpleNamespace\) lacks"):
        Models(policy=SimpleNamespace()).rest()
