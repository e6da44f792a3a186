"""The calls of trackers, by the files of real wandb and, where it is installed, SwanLab; trackio is a stand-in, as its packages
conflict with vLLM's."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_x.config.writer import read_settings
from areal_x.errors import ConfigError, UserError
from areal_x.monitor import metrics, trackers
from areal_x.monitor.metrics import MetricsWriter
from areal_x.monitor.trackers import TrackingConfig
from tests.experiments import tiny_experiment

SETTINGS = {"train.steps": 3, "grpo.loss": "@soft_clip"}
WRITE = """
import json, sys
from pathlib import Path
from areal_x.monitor.metrics import MetricsWriter
from areal_x.monitor.trackers import TrackingConfig, start
LOGGER, TRACKING = sys.argv[2], TrackingConfig(**json.loads(sys.argv[3]))
for directory, resumed, steps in json.loads(sys.argv[1]):
    run = Path(directory)
    tracker = start(LOGGER, run, "additions", {"train.steps": 3, "grpo.loss": "@soft_clip"}, TRACKING)
    with MetricsWriter(run, [tracker], resumed) as writer:
        for step in steps:
            writer.write({"step": step, "reward": step / 2, "accuracy": None})
"""
HEADER, BLOCK, ENDS_A_RECORD = 7, 32768, (1, 4)  # of LevelDB's log, in which wandb writes


def records(file: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in ENDS_A_RECORD:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def shown(file: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The run, its configuration, and its rows."""
    of = list(records(file))
    (run,) = [record.run for record in of if record.WhichOneof("record_type") == "run"]
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in of
        if record.WhichOneof("record_type") == "history"
    ]
    kept = [{key: x for key, x in row.items() if not key.startswith("_")} for row in rows]
    return run, {c.key: json.loads(c.value_json) for c in run.config.update if not c.key.startswith("_")}, kept


def write(tmp_path: Path, logger: str, work: list[tuple[str, int | None, list[int]]], **tracking: Any) -> None:
    """Logs steps of runs, each from the step it is resumed at, in a process of its own without a network."""
    offline = {**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", WRITE, json.dumps(work), logger, json.dumps(tracking)]
    subprocess.run(command, env=offline, check=True, cwd=Path(__file__).parents[2])


def test_wandb_shows_settings_and_rows_and_goes_on_with_a_resumed_run_alone(tmp_path: Path) -> None:
    """Two machines each have a run x-1; the first's is resumed from its second step."""
    pytest.importorskip("wandb")
    here, there = tmp_path / "here" / "x-1", tmp_path / "there" / "x-1"
    for run in (here, there):
        run.mkdir(parents=True)
    work = [(str(here), None, [1, 2, 3]), (str(here), 2, [3, 4]), (str(there), None, [1])]
    write(tmp_path, "wandb", work)
    first, again = sorted(here.rglob("*.wandb"))
    (other,) = there.rglob("*.wandb")
    run, settings, rows = shown(first)
    assert (run.project, run.display_name, settings) == ("additions", "x-1", SETTINGS)
    assert rows == [{"step": step, "reward": step / 2} for step in (1, 2, 3)]
    resumed, _, rows = shown(again)
    assert resumed.run_id == run.run_id
    assert rows == [{"step": step, "reward": step / 2} for step in (3, 4)]  # none refused, though 3 was there before
    assert shown(other)[0].run_id != run.run_id
    assert {run.run_id, shown(other)[0].run_id} == {(at / trackers.ID).read_text() for at in (here, there)}


def test_wandb_gets_entity_group_tags_and_the_runs_files_and_model(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "runs" / "x-1"
    model = run / "checkpoints" / "7" / "trainer"
    model.mkdir(parents=True)
    for file in ("model.safetensors", "config.json", "optimizer.bin"):
        (model / file).write_text(file)
    (run / "config.gin").write_text("train.steps = 3")
    given = {"entity": "us", "run_group": "ablations", "tags": ["first", "short"], "mode": "offline"}
    write(tmp_path, "wandb", [(str(run), None, [1])], **given, artifacts=["files", "model"])
    (file,) = run.rglob("*.wandb")
    shows, _, rows = shown(file)
    assert (shows.entity, shows.run_group, list(shows.tags)) == ("us", "ablations", ["first", "short"])
    assert rows == [{"step": 1, "reward": 0.5}]
    stored = [r.artifact for r in records(file) if r.WhichOneof("record_type") == "artifact"]
    files = {a.type: sorted(c.path for c in a.manifest.contents) for a in stored}
    assert files == {"files": ["config.gin", "metrics.jsonl"], "model": ["config.json", "model.safetensors"]}
    assert json.loads(next(a.metadata for a in stored if a.type == "model")) == {"step": 7}


def test_swanlab_keeps_settings_and_rows_of_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    run = tmp_path / "x-1"
    run.mkdir()
    write(tmp_path, "swanlab", [(str(run), None, [1, 2]), (str(run), 1, [2, 3])], mode="offline", tags=["short"], run_group="g")
    files = list((run / "swanlog").rglob("*.swanlab"))
    assert len(files) == 2
    assert all((run / trackers.ID).read_text().encode() in file.read_bytes() for file in files)
    assert "@soft_clip" in next((run / "swanlog").rglob("config.yaml")).read_text()


def test_swanlab_gets_the_workspace_and_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("finished"))
    package = types.ModuleType("swanlab")
    package.init = lambda **given: logged.append(given) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swanlab", package)
    tracking = TrackingConfig(entity="us", tags=("a",), mode="offline")
    with MetricsWriter(tmp_path, [trackers.start("swanlab", tmp_path, "additions", SETTINGS, tracking)]) as writer:
        writer.write({"step": 4, "reward": 0.5, "accuracy": None})
    begun, *rows = logged
    assert rows == [(4, {"reward": 0.5}), "finished"]
    assert begun == begun | {"project": "additions", "workspace": "us", "tags": ["a"], "mode": "offline", "config": SETTINGS}


@pytest.mark.parametrize(
    "tracking, loggers, why",
    [
        (TrackingConfig(entity="us"), (), "'wandb' or 'swanlab'"),
        (TrackingConfig(mode="offline"), ("trackio",), "tracking.mode = 'offline' cannot work: it must be left out, or"),
        (TrackingConfig(artifacts=("model",)), ("swanlab",), "must have 'wandb'"),
        (TrackingConfig(artifacts=("models",)), ("wandb",), "did you mean 'model'"),
        (TrackingConfig(mode="of-line"), ("wandb",), "did you mean 'offline'"),
    ],
)
def test_a_setting_that_no_logger_reads_is_refused(tracking: TrackingConfig, loggers: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tracking.check(loggers)


def test_trackio_gets_each_row_under_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("finished"))
    package = types.ModuleType("trackio")
    package.init = lambda **given: logged.append(given) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", package)
    directory = tmp_path / "my-run"
    directory.mkdir()
    with MetricsWriter(directory, [trackers.start("trackio", directory, "additions", SETTINGS)]) as writer:
        writer.write({"step": 4, "reward": 0.5, "accuracy": None})
    name = (directory / trackers.ID).read_text()
    begun = {"project": "additions", "name": name, "resume": "allow", "config": SETTINGS}
    assert logged == [begun, (4, {"reward": 0.5}), "finished"]
    assert metrics.read(directory) == [{"step": 4, "reward": 0.5, "accuracy": None}]


def test_no_tracker_is_begun_for_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    (tmp_path / metrics.FILE).write_text("{]\n")
    begun: list[str] = []
    with pytest.raises(UserError, match="is damaged"):
        MetricsWriter(tmp_path, (begun.append(name) for name in ("wandb",)), resumed_at=1)  # type: ignore[func-returns-value, misc]
    assert begun == []


def test_an_id_stays_with_the_run_wherever_it_is_moved_and_is_nobody_elses(tmp_path: Path) -> None:
    runs = [tmp_path / place / "a run/of:mine#1".replace("/", "-") for place in ("here", "there")]
    for run in runs:
        run.mkdir(parents=True)
    first, second = map(trackers.unique_id, runs)
    assert first != second
    assert first.startswith("a-run-of-mine-1-")  # of letters that wandb takes
    shutil.move(runs[0], tmp_path / "elsewhere")
    assert trackers.unique_id(tmp_path / "elsewhere") == first


def test_a_run_hands_its_settings_and_its_project_to_the_tracker(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    run = types.SimpleNamespace(log=lambda row, step: None, finish=lambda: None)
    package = types.ModuleType("trackio")
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    package.init = lambda **given: begun.append(given) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", package)
    experiment = tiny_experiment(tiny_model_dir, tmp_path, steps=1, loggers=("trackio",), project="mine", backend="torch")
    result = experiment.run()
    assert begun[0]["project"] == "mine"
    assert begun[0]["config"] == read_settings(result.directory)
    assert {"train.steps": 1, "train.backend": "torch", "optimizer.learning_rate": 1e-3}.items() <= begun[0]["config"].items()


def test_a_tracker_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train\.loggers asks for wandb, which is not installed: pip install wandb"):
        trackers.check_loggers(("wandb",))


def test_an_unknown_tracker_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"train.loggers = 'wandbb' cannot work: .*did you mean 'wandb'\?"):
        trackers.check_loggers(("wandbb",))
