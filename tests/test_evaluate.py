"""The commands that evaluate models and collect attempts, from gin files, on the embedded engine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from areal_x import evaluate, rollout_command
from areal_x.errors import UserError
from areal_x.lab.index import Index
from areal_x.monitor.metrics import read
from areal_x.run.journal import Journal
from areal_x.testing.models import write_model
from tests.experiments import tiny_experiment

CONFIG = """
import examples.arithmetic.task
model.path = '{model}'
train.dataset = @never/load_dataset()   # an evaluation does not read it
never/load_dataset.path = '/no/such/file.jsonl'
train.workflow = @single_turn()
single_turn.reward = @math_answer
sampling.max_tokens = 4
train.evaluations = [@few/evaluation_set(), @more/evaluation_set()]
few/evaluation_set.name = 'few'
few/evaluation_set.dataset = @few/arithmetic.problems()
few/arithmetic.problems.count = 5
more/evaluation_set.name = 'more'
more/evaluation_set.dataset = @more/arithmetic.problems()
more/evaluation_set.attempts = 2
more/arithmetic.problems.count = 8
train.row_length = 64
train.backend = 'torch'
train.runs = '{runs}'
embedded.slots = 8
"""


@pytest.fixture
def file(tiny_model_dir, tmp_path):
    pytest.importorskip("areal_x_torch")
    made = tmp_path / "sets.gin"
    made.write_text(CONFIG.format(model=tiny_model_dir, runs=tmp_path / "runs"))
    return made


def test_two_models_are_evaluated_on_all_sets_and_compared(file, tiny_model_dir, tmp_path, capsys):
    other, report = str(write_model(tmp_path / "other", seed=7)), tmp_path / "report.json"
    words = [str(file), "--model", str(tiny_model_dir), other, "-n", "4", "--json", str(report)]
    assert evaluate.main(words) == 0
    shown = capsys.readouterr().out
    assert "| more | 8     | 4 sampled | pass@2    |" in shown
    told = json.loads(report.read_text())
    assert [one["name"] for one in told["models"][other]["sets"]] == ["few", "more"]
    assert {(x["set"], x["statistic"]) for x in told["comparisons"]} == {
        (name, statistic) for name in ("few", "more") for statistic in ("avg@4", "pass@1", "pass@2", "pass@4")
    }
    for label, attempts in ((str(tiny_model_dir), 52), (other, 52)):
        run = tmp_path / "runs" / told["models"][label]["run"].split("/")[-1]
        sets = {one["name"]: one for one in told["models"][label]["sets"]}
        (row,) = read(run)
        assert row["evaluation/few/avg@4"] == pytest.approx(np.mean([t["rewards"] for t in sets["few"]["tasks"]]))
        assert json.loads((run / evaluate.FILE).read_text())["models"][label]["sets"] == list(sets.values())
        with Journal(run) as journal:
            table = journal.to_pandas()
        assert len(table) == attempts
        assert sorted(table["reward"]) == sorted(r for one in sets.values() for t in one["tasks"] for r in t["rewards"])
        assert set(table["task"]) == {f"{name}/{t['id']}" for name, one in sets.items() for t in one["tasks"]}


def test_one_set_greedily_and_a_part_of_its_tasks(file, tmp_path, capsys):
    assert evaluate.main([str(file), "--set", "more", "--greedy", "--tasks", "3"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    (row,) = read(run)
    assert {key.split("/")[1] for key in row if "/" in key} == {"more"}
    (of,) = json.loads((run / evaluate.FILE).read_text())["models"].values()
    assert [len(t["rewards"]) for t in of["sets"][0]["tasks"]] == [1] * 3
    assert "| more | 3     | greedy " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--set", "fwe"], "there is no evaluation set 'fwe'; did you mean 'few'?"),
        (["-n", "0"], "evaluation_set.attempts = 0"),
        (["-n", "4", "--greedy"], "greedy attempts are all the same"),
        (["--confidence", "95"], "--confidence = 95.0 must be between 0 and 1"),
        (["--tasks", "0"], "--tasks = 0"),
        (["--model", "a", "b", "a"], "--model names a twice"),
        (["-b", "train.engine = 'none'", "-b", "train.evaluations = ()"], "there is nothing to evaluate"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_in_a_sentence(file, words, sentence, capsys):
    assert evaluate.main([str(file), *words]) == 1
    assert sentence in capsys.readouterr().err


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    run = tmp_path / "run"
    for step in (2, 10):
        (run / "checkpoints" / str(step) / "trainer").mkdir(parents=True)
    assert evaluate.model_directory(str(run / "checkpoints" / "2")) == str(run / "checkpoints" / "2" / "trainer")
    assert evaluate.model_directory("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (run / "config.gin").touch()
    assert evaluate.model_directory(str(run)) == str(run / "checkpoints" / "10" / "trainer")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.gin").touch()
    with pytest.raises(UserError, match="has no checkpoint"):
        evaluate.model_directory(str(tmp_path / "begun"))


def test_a_rollout_keeps_a_journal_of_scored_groups_that_the_lab_reads(tiny_model_dir, tmp_path, capsys):
    # A rollout has one step, whichever of the run's are profiled.
    experiment = tiny_experiment(tiny_model_dir, tmp_path, name=None, steps=3, profile_steps=(3,))
    found = rollout_command.collect(experiment, tasks=7)
    assert "7 groups are in the journal of" in capsys.readouterr().out
    with Journal(found.run) as journal:
        table = journal.to_pandas()
    assert (len(table), table["task"].nunique(), set(table["step"])) == (28, 7, {1})
    by_task = table.groupby("task")["reward"].apply(list)
    assert all(by_task[group.task.id] == group.rewards for group in found.groups)
    index = Index(found.run)
    index.refresh()
    assert len(index.groups) == 7
    assert len(index.rows) == 28
    (row,) = read(found.run)
    assert row["reward"] == pytest.approx(table["reward"].mean())
    model = replace(experiment.trainer, model=replace(experiment.trainer.model, path="/no/model"))
    again = rollout_command.collect(replace(experiment, trainer=model), tasks=7, model=str(tiny_model_dir))
    assert [g.rewards for g in again.groups] == [g.rewards for g in found.groups]


def test_a_rollout_without_an_engine_or_a_task_is_refused(tiny_model_dir, tmp_path):
    experiment = tiny_experiment(tiny_model_dir, tmp_path)
    with pytest.raises(UserError, match=r"train\.engine = 'none'"):
        rollout_command.collect(replace(experiment, engine="none"), tasks=7)
    with pytest.raises(UserError, match="--tasks = 0"):
        rollout_command.collect(experiment, tasks=0)
