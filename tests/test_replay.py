"""A journal gives a run's losses again, without an engine; and a run that was killed goes on from what it had."""

import shutil
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from areal_x.algorithms.recipes import gspo
from areal_x.cluster.config import ClusterConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import UserError
from areal_x.monitor.metrics import read
from areal_x.replay import Replay, compare_losses
from areal_x.run import checkpoint
from areal_x.run.journal import FILE, Journal
from areal_x.runtime import cores
from tests.experiments import TRUNCATED, tiny_experiment
from tests.launching import ONLINE, command_of, finished
from tests.thorough import thorough

# A loss near zero is what is left of terms of about 1, each rounded in fp32 and summed in another order.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def recorded(tiny_model_dir, tmp_path_factory):
    """A run whose rollout was ahead of its trainer, and which sampled from the likeliest tokens alone."""
    runs = tmp_path_factory.mktemp("runs")
    experiment = tiny_experiment(tiny_model_dir, runs, max_staleness=2, window=3, checkpoint_every=3, workflow=TRUNCATED)
    return experiment, experiment.run()


def replayed(experiment, run, **changes):
    given = {**vars(experiment), "recorded": run, "name": None, **changes}
    return Replay(**given).run()


def losses(rows):
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_gives_its_losses_again_to_the_last_bit(recorded):
    experiment, run = recorded
    again = replayed(experiment, run.directory)
    assert losses(again.metrics) == losses(run.metrics)
    assert compare_losses(run.metrics, again.metrics) == "all 6 losses equal the run's to the last bit"


def test_the_other_backend_gives_them_but_for_rounding(recorded):
    experiment, run = recorded
    other = {"jax": "torch", "torch": "jax"}[experiment.backend]
    pytest.importorskip(f"areal_x_{other}")
    again = replayed(experiment, run.directory, backend=other)
    np.testing.assert_allclose(losses(again.metrics), losses(run.metrics), rtol=1e-4, atol=ROUNDING)


def test_a_step_is_computed_again_with_the_threads_that_it_had(recorded, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from areal_x_torch.trainer import Trainer

    monkeypatch.setattr(cores, "available", lambda: 2)
    torch.set_num_threads(2)
    counts, computed = [2, 1, 1, 2, 1, 2], []
    chosen = iter(counts)
    experiment = replace(recorded[0], backend="torch", runs=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(cores.Threads, "choose", lambda *_: next(chosen))
        run = experiment.run()
    assert [row["threads"] for row in run.metrics if row["step"]] == counts

    def update(trainer, *given):
        computed.append(trainer.threads)
        return original(trainer, *given)

    original = Trainer.update
    monkeypatch.setattr(Trainer, "update", update)
    again = replayed(experiment, run.directory)
    assert computed == [row["threads"] for row in again.metrics if row["step"]] == counts
    assert losses(again.metrics) == losses(run.metrics)


def test_another_algorithm_sees_the_same_groups_and_learns_otherwise(recorded):
    experiment, run = recorded
    again = replayed(experiment, run.directory, algorithm=gspo())
    for name in ("reward", "trained_tokens", "staleness_max"):
        assert [row[name] for row in again.metrics if name in row] == [row[name] for row in run.metrics if name in row]
    assert losses(again.metrics)[1:] != losses(run.metrics)[1:]
    assert compare_losses(run.metrics, again.metrics).startswith("the largest difference among 6 losses is ")


def test_a_journal_whose_beginning_is_gone_is_refused_in_a_sentence(recorded, tmp_path):
    experiment, run = recorded
    copied = shutil.copytree(run.directory, tmp_path / "run")
    with Journal(copied, keep_steps=2) as journal:
        journal.prune(oldest_checkpoint=6, step=6)
    with pytest.raises(
        UserError, match=r"journal\.sqlite begins at step 5, and the model from before that step is not there: jour"
    ):
        Replay(**{**vars(experiment), "recorded": copied}).recorded_steps()


def test_a_killed_run_takes_its_lost_steps_again_with_the_same_groups(recorded, tmp_path):
    experiment, whole = recorded
    # What a kill leaves after the last step: the checkpoint of step 3, and a journal that is further.
    runs = tmp_path / "runs"
    run = shutil.copytree(whole.directory, runs / "run")
    shutil.rmtree(run / "checkpoints" / "6")
    assert checkpoint.steps(run) == [3]
    resumed = replace(experiment, runs=str(runs)).run(resume=True)
    assert losses(resumed.metrics) == losses(whole.metrics)
    with Journal(run) as journal:
        assert journal.steps() == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_journal_is_gone_goes_on_with_its_checkpoint(recorded, tmp_path):
    experiment, whole = recorded
    run = shutil.copytree(whole.directory, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "6")
    (run / FILE).unlink()
    resumed = replace(experiment, runs=str(tmp_path)).run(resume=True)
    assert [row["step"] for row in resumed.metrics] == list(range(7))


@thorough
def test_the_command_replays_a_run_and_says_how_like_it_is(tiny_model_dir, tmp_path):
    folder = tmp_path / "folder"
    finished(command_of(tiny_model_dir, folder, ONLINE, "mesh.fsdp = 1"), 1, 1, folder)
    finished([sys.executable, "-m", "areal_x.replay", "runs/run"], 1, 1, folder)
    assert (folder / "out-0").read_text().splitlines()[-1] == "all 2 losses equal the run's to the last bit"
    assert losses(read(folder / "runs" / "run-replay-1")) == losses(read(folder / "runs" / "run"))
    pytest.importorskip("torch")
    finished([sys.executable, "-m", "areal_x.replay", "runs/run", "-b", "train.backend = 'torch'"], 1, 1, folder)
    ours, theirs = (losses(read(folder / "runs" / name)) for name in ("run-replay-2", "run"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=ROUNDING)
    with pytest.raises(AssertionError, match=r"error: nowhere has no journal\.sqlite: name the directory of a run"):
        finished([sys.executable, "-m", "areal_x.replay", "nowhere"], 1, 1, folder)


def test_a_replay_places_no_servers_and_no_shards(tiny_model_dir, tmp_path):
    settings = {"cluster": "ray", "engine": "vllm", "placement": ClusterConfig(shards=2), "vllm": VLLMConfig(servers=2)}
    run = tiny_experiment(tiny_model_dir, tmp_path, backend="torch", **settings)
    assert run.places_servers
    assert run.shards == 2
    replay = Replay(**{f.name: getattr(run, f.name) for f in fields(run)}, recorded=tmp_path)
    assert not replay.places_servers
    assert replay.shards == 0
    with replay.kept() as starter, replay.sharded(tmp_path, None, None, tmp_path, print) as sharded:
        assert (starter, sharded) == (None, None)
