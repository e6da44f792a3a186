"""A fork: a second run from a checkpoint of another."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from areal_x import Experiment
from areal_x.errors import UserError
from areal_x.run import checkpoint
from areal_x.run.forking import fork_run
from areal_x.run.journal import FILE, Journal
from examples.letters import task
from tests.lab.journals import group, scored, write_journal
from tests.thorough import thorough


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4, and a journal that another connection still writes to."""
    run = tmp_path / "runs" / "one"
    write_journal(run, [group(i, [scored("a", 1.0)]) for i in range(4)], [[0], [1]])
    for step in (2, 4):
        checkpoint.save(
            run, step, lambda place: (place / "weights").write_text(str(place)) and None, {"rollout": {"next_ticket": 2 + step}}
        )
    (run / "config.gin").write_text("train.steps = 4\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_fork_has_one_checkpoint_the_settings_and_what_was_recorded(run):
    before = contents(run)
    fork = fork_run(run, "two")
    assert fork == run.parent / "two"
    assert checkpoint.newest(fork)[0] == 4
    assert checkpoint.steps(fork) == [4]
    assert {"config.gin", "metrics.jsonl", FILE} <= contents(fork).keys()
    with Journal(fork) as journal:
        assert [g.ticket for g in journal.groups_of(1)] == [0]
    assert contents(run) == before


def test_it_has_no_samples_of_policies_that_it_never_had(run):
    """At step 2 the tickets 0 to 3 were admitted: 0 and 1 are consumed, 2 has a token of version 3, 4 is later."""
    with Journal(run) as journal:  # which is being written
        journal.admitted(group(4, []), 4)
        journal.finished(group(2, [scored("b", 1.0, version=3)]))
        journal.consumed(3, [group(3, [])])
        journal.flush()
        fork = fork_run(run, "two", 2)
    assert checkpoint.steps(fork) == [2]
    with closing(sqlite3.connect(fork / FILE)) as connection:
        groups = connection.execute("SELECT ticket, status, content IS NULL FROM groups ORDER BY ticket").fetchall()
        assert groups == [(0, "finished", 0), (1, "finished", 0), (2, "admitted", 1), (3, "finished", 0)]
        assert connection.execute("SELECT step, ticket FROM consumed").fetchall() == [(1, 0), (2, 1)]


def test_the_runs_share_no_file_that_may_change(run):
    fork = fork_run(run, "two")
    shared = [f for f in contents(fork) if (run / f).is_file() and (run / f).samefile(fork / f)]
    assert all(f.startswith("checkpoints/") for f in shared)


@pytest.mark.parametrize("name", ["one", "../two", "a/b", ""])
def test_a_name_that_is_taken_or_elsewhere_is_refused(run, name):
    with pytest.raises(UserError, match="choose a name that no run has"):
        fork_run(run, name)


def test_what_is_not_there_or_damaged_is_refused_and_leaves_nothing(run):
    with pytest.raises(UserError, match="no checkpoint of step 3: 2, 4"):
        fork_run(run, "two", 3)
    (run / "checkpoints" / "4" / "weights").write_text("x")
    with pytest.raises(UserError, match="is damaged"):
        fork_run(run, "two")
    assert [p.name for p in run.parent.iterdir()] == ["one"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A deterministic run of four steps, which has been made."""
    pytest.importorskip("areal_x_torch")
    runs = str(tmp_path_factory.mktemp("runs"))
    settings = {"deterministic": True, "checkpoint_every": 2, "held_out": (), "groups_per_step": 2, "name": "whole"}
    made = task.experiment(runs=runs, steps=4, **settings)
    finish(made)
    return made


def finish(experiment: Experiment, resume: bool = False) -> str:
    """Runs to the end and returns the digest of the weights."""
    run = experiment.open(resume=resume)
    for _ in experiment.turns(run, resume=resume):
        pass
    manifest = json.loads((run / "checkpoints" / str(experiment.steps) / checkpoint.MANIFEST).read_text())
    return str(manifest["files"]["trainer/model.safetensors"]["sha256"])


@thorough
@pytest.mark.parametrize("of", ["newest", "earlier"])
def test_a_fork_continues_as_the_run_would_have(whole, of):
    run = Path(whole.runs, "whole")
    if of == "newest":  # of a run that stopped where it is forked
        half = replace(whole, name="half", steps=2)
        finish(half)
        run = Path(whole.runs, "half")
    fork_run(run, f"fork of the {of}", 2)
    end = finish(replace(whole, name=f"fork of the {of}"), resume=True)
    manifest = json.loads(Path(whole.runs, "whole", "checkpoints", "4", checkpoint.MANIFEST).read_text())
    assert end == manifest["files"]["trainer/model.safetensors"]["sha256"]


@thorough
def test_a_fork_with_another_setting_goes_another_way_and_leaves_the_run_as_it_was(whole):
    run = Path(whole.runs, "whole")
    before = contents(run)
    fork_run(run, "other", 2)
    trainer = replace(whole.trainer, optimizer=replace(whole.trainer.optimizer, learning_rate=1e-3))
    end = finish(replace(whole, name="other", trainer=trainer), resume=True)
    manifest = json.loads((run / "checkpoints" / "4" / checkpoint.MANIFEST).read_text())
    assert end != manifest["files"]["trainer/model.safetensors"]["sha256"]
    assert contents(run) == before
