"""Every recipe through the whole ring, on a tiny model: what each pays for is there, and it learns from what it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import corrections, recipes
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import CriticConfig, OptimizerConfig
from areal_x.replay import Replay
from areal_x.testing.models import write_model
from areal_x.testing.reference import Reference
from areal_x.workflows.supervised import Demonstrations, PreferencePairs
from tests.experiments import TASKS, tiny_experiment
from tests.thorough import further

WRITTEN = [replace(task, answer="1" * (1 + i % 4)) for i, task in enumerate(TASKS)]
PAIRS = [replace(task, answer={"chosen": "11" * (1 + i % 2), "rejected": "2" * (1 + i % 3)}) for i, task in enumerate(TASKS)]

ONLINE = {
    "grpo": {"kl_coefficient": 0.04, "entropy_coefficient": 0.01},
    "dr_grpo": {"max_tokens": 8},
    "dapo": {"max_tokens": 8, "overlong_buffer": 4},
    "lite_ppo": {},
    "gspo": {},
    "gmpo": {},
    "sapo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_pp": {"reward_kl": 0.01, "baseline": True},
    "ppo": {"reward_kl": 0.01},
    "m2po": {},
    "decoupled_ppo": {},
    "dppo": {},
    "icepop": {},
    "kpop": {},
    "maxrl": {},
    "turn_ppo": {"truncated": "bootstrap"},
    "opo": {},
    "remax": {},
}
FIRST = ("grpo", "dapo", "remax", "ppo", "decoupled_ppo")  # of every kind one


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """torch, which compiles nothing, unless a test says otherwise: that both give the same step is tested elsewhere."""
    backend = getattr(request, "param", "torch")
    pytest.importorskip(f"areal_x_{backend}")
    return backend


on_both = pytest.mark.parametrize("backend", ["torch", *further("jax")], indirect=True)


@pytest.fixture
def experiment(backend: str, tiny_model_dir: Path, tmp_path: Path) -> Experiment:
    return tiny_experiment(tiny_model_dir, tmp_path / "runs", backend=backend, steps=2, max_staleness=1)


def offline(experiment: Experiment, **changes: Any) -> Experiment:
    return replace(experiment, engine="none", group_size=1, groups_per_step=5, **changes)


@pytest.mark.parametrize(
    "backend, name",
    [
        *(("torch", name) for name in FIRST),
        ("jax", "grpo"),
        *further(*(("torch", name) for name in ONLINE if name not in FIRST)),
        *further(*(("jax", name) for name in ("ppo", "decoupled_ppo", "remax"))),
    ],
    indirect=["backend"],
)
def test_a_recipe_runs_with_several_optimizer_steps_a_batch(experiment, name):
    run = replace(experiment, algorithm=getattr(recipes, name)(**ONLINE[name]), minibatches=2)
    rows = [turn.metrics for turn in run.turns(run.open()) if turn.groups]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert model_dir.read_trainer_state(Path(run.runs) / "run" / "checkpoints" / "2" / "trainer")["version"] == 4


def test_minibatches_share_the_groups_and_the_policy_before_the_step(experiment):
    run = replace(experiment, algorithm=recipes.decoupled_ppo(), minibatches=2, groups_per_step=4)
    for turn in run.turns(run.open()):
        if not turn.groups:
            continue
        assert sum(int(batch.mask.sum()) for batch in turn.batches) == turn.metrics["trained_tokens"]
        assert [float(batch.weights.sum()) for batch in turn.batches] == pytest.approx([1.0, 1.0], abs=0.2)
        for batch in turn.batches:
            gap = np.abs(batch.proximal_logp - batch.behavior_logp)[batch.mask & (batch.versions == turn.metrics["step"] - 1)]
            assert gap.size == 0 or gap.max() < 1e-4


def test_the_critic_learns_is_saved_and_goes_on(experiment):
    critic = CriticConfig(learning_rate=3e-3)
    still = replace(experiment.trainer, optimizer=OptimizerConfig(learning_rate=1e-9))  # so that returns stay what they are
    run = replace(experiment, algorithm=recipes.ppo(), critic=critic, trainer=still, steps=8, checkpoint_every=3)
    rows = []
    for turn in run.turns(run.open()):
        rows.append(turn.metrics)
        if turn.metrics["step"] == 5:
            break
    for turn in run.turns(run.open(resume=True), resume=True):
        if turn.groups:
            rows.append(turn.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    errors = [row["critic/value_error"] for row in rows[1:]]
    assert errors[-1] < errors[0]
    assert rows[6]["critic/value_error"] == pytest.approx(rows[4]["critic/value_error"], rel=0.05)
    assert rows[1]["explained_variance"] <= 0 + 1e-6  # it begins at 0 everywhere


def test_an_interpolated_policy_is_nearer_to_the_new_one_the_older_the_token(experiment):
    algorithm = recipes.decoupled_ppo(proximal="interpolate")
    run = replace(experiment, algorithm=algorithm, max_staleness=3, steps=5)
    ages = [turn.batch.ages[turn.batch.mask].max() for turn in run.turns(run.open()) if turn.groups]
    assert max(ages) >= 2


def test_dynamic_sampling_trains_on_varied_groups_alone(experiment):
    run = replace(experiment, algorithm=recipes.dapo(), steps=3)
    groups = [group for turn in run.turns(run.open()) for group in turn.groups]
    assert all(len(set(group.rewards)) > 1 for group in groups)


def test_remax_compares_with_a_greedy_answer(experiment):
    run = replace(experiment, algorithm=recipes.remax(), group_size=2)
    for turn in run.turns(run.open()):
        for group in turn.groups:
            assert group.greedy_reward is not None
            assert len(group.episodes) == 2


def test_a_correction_takes_weight_and_denominators_stay(experiment):
    def half(log_ratio, mask, segment_ids):
        return np.where(segment_ids % 2 == 1, mask, 0)

    run = replace(experiment, algorithm=recipes.grpo(corrections=half), steps=1)
    batch = next(turn.batch for turn in run.turns(run.open()) if turn.groups)
    assert batch.weights.sum() < 0.9
    assert (batch.weights[batch.segment_ids % 2 == 0] == 0).all()


@on_both
def test_supervised_learning_from_a_dataset(experiment):
    run = offline(experiment, algorithm=recipes.sft(), workflow=Demonstrations(), dataset=WRITTEN, steps=20)
    losses = [turn.metrics["loss"] for turn in run.turns(run.open()) if turn.groups]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "backend, name, beta", [("torch", "dpo", 0.1), ("torch", "ipo", 0.5), *further(("jax", "dpo", 0.1))], indirect=["backend"]
)
def test_preferences_widen_the_margin(experiment, name, beta):
    algorithm = getattr(recipes, name)(beta=beta)
    run = offline(experiment, algorithm=algorithm, workflow=PreferencePairs(), dataset=PAIRS, steps=15)
    rows = [turn.metrics for turn in run.turns(run.open()) if turn.groups]
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["margin"] > 0
    assert rows[-1]["pair_accuracy"] == 1
    assert rows[-1]["loss"] < rows[0]["loss"]


@on_both
def test_a_reward_model_prefers_what_was_chosen(experiment):
    workflow = PreferencePairs(last_token=True)
    run = offline(experiment, algorithm=recipes.reward_model(), workflow=workflow, dataset=PAIRS, steps=30)
    rows = [turn.metrics for turn in run.turns(run.open()) if turn.groups]
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[-1]["pair_accuracy"] == 1


def test_a_student_comes_nearer_to_its_teacher(experiment, tmp_path):
    teacher = replace(
        offline(experiment, algorithm=recipes.sft(), workflow=Demonstrations(), dataset=WRITTEN, steps=20), name="teacher"
    )
    for _ in teacher.turns(teacher.open()):
        pass
    path = str(Path(experiment.runs) / "teacher" / "checkpoints" / "20" / "trainer")
    for algorithm, metric in ((recipes.distill(), "teacher_kl"), (recipes.distill(beta=0.5), "teacher_divergence")):
        run = replace(experiment, algorithm=algorithm, teacher=path, steps=12, name=metric)
        turns = [turn for turn in run.turns(run.open()) if turn.groups]
        said = [turn.metrics[metric] for turn in turns]
        assert np.mean(said[-3:]) < 0.7 * said[0]
        assert (turns[0].batch.reference_logp is None) == ("teacher" not in algorithm.needs)


@pytest.mark.parametrize(
    "backend, teacher, changes",
    [("torch", "initial", {}), *further(("jax", "initial", {}), ("torch", "current", {"share_prompts": True}))],
    indirect=["backend"],
)
def test_a_model_learns_what_it_would_answer_had_it_read_more(experiment, teacher, changes):
    def hinted(task):
        return "1+1+1+" + task.prompt

    algorithm = recipes.self_distill(hinted, teacher=teacher, clip=3.0)
    run = replace(experiment, algorithm=algorithm, steps=12, group_size=8, **changes)
    turns = [turn for turn in run.turns(run.open()) if turn.groups]
    gaps = [turn.metrics["teacher_kl"] for turn in turns]
    assert np.mean(gaps[-3:]) < 0.7 * gaps[0]
    again = Replay(**{**vars(run), "recorded": Path(run.runs) / "run", "name": None}).run()
    assert [row["loss"] for row in again.metrics if "loss" in row] == [turn.metrics["loss"] for turn in turns]


@on_both
def test_every_task_is_learned_from_the_teacher_of_its_domain(experiment, tmp_path):
    teachers = {name: str(write_model(tmp_path / name, seed=seed)) for name, seed in (("even", 5), ("odd", 6))}
    tasks = [replace(task, metadata={"domain": ("even", "odd")[i % 2]}) for i, task in enumerate(TASKS)]
    algorithm = recipes.multi_distill()
    run = replace(experiment, algorithm=algorithm, teachers=teachers, dataset=tasks, steps=16, groups_per_step=4)
    turns = [turn for turn in run.turns(run.open()) if turn.groups]
    gaps = [turn.metrics["teacher_kl"] for turn in turns]
    assert np.mean(gaps[-4:]) < 0.9 * gaps[0]  # of other groups in each step
    references = {name: Reference(Path(path)) for name, path in teachers.items()}
    scored = sorted(np.round(turns[0].batch.reference_logp[turns[0].batch.mask], 3).tolist())
    wanted = [
        references[group.task.metadata["domain"]].logprobs(t.tokens)[t.mask]
        for group in turns[0].groups
        for e in group.scored
        for t in e.trajectories
    ]
    np.testing.assert_allclose(scored, sorted(np.concatenate(wanted).tolist()), atol=2e-3)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"algorithm": recipes.multi_distill()}, r"train\.teachers = {} .* {name: model} of the models"),
        (
            {"algorithm": recipes.multi_distill(), "teachers": {"a": ["x"]}},
            r"train\.teachers\['a'\] = \['x'\] .* a directory, a hub name",
        ),
        ({"algorithm": recipes.distill()}, r"train\.teacher = None"),
        ({"algorithm": recipes.distill(beta=0.5)}, r"train\.teacher = None"),
        ({"algorithm": recipes.distill(beta=0.5), "teacher": "http://host:8000"}, "no server returns the whole distribution"),
        ({"algorithm": recipes.reward_model()}, r"train\.engine = 'embedded' cannot work: it must be 'none'"),
        ({"minibatches": 3}, r"train\.minibatches = 3"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(experiment, changes, says):
    with pytest.raises(ConfigError, match=says):
        replace(experiment, **changes)


def test_a_teacher_with_other_tokens_is_refused(experiment, tmp_path):
    from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer

    other = write_model(tmp_path / "other")
    write_tokenizer(other, CHARACTERS[::-1])
    run = replace(experiment, algorithm=recipes.distill(), teacher=str(other))
    with pytest.raises(ConfigError, match=r"train\.teacher .* a model with the tokens of"):
        next(run.turns(run.open()))


def test_answers_that_are_no_pairs_end_the_run_with_their_task(experiment):
    run = offline(experiment, algorithm=recipes.dpo(), workflow=PreferencePairs(), dataset=TASKS)
    with pytest.raises(UserError, match=r"task '\d' is not a pair"):
        for _ in run.turns(run.open()):
            pass


def test_second_moment_looks_at_the_whole_optimizer_batch(experiment):
    seen: list[tuple[int, ...]] = []

    def watch(log_ratio, mask, segment_ids):
        seen.append(mask.shape)
        return corrections.second_moment(log_ratio, mask, segment_ids)

    run = replace(experiment, algorithm=recipes.grpo(corrections=watch, proximal="recompute"), steps=1, minibatches=2)
    batches = next(turn.batches for turn in run.turns(run.open()) if turn.groups)
    assert seen == [batch.shape for batch in batches]
