"""The calls of trackers, by the files of real wandb; trackio is a stand-in, as its packages conflict with vLLM's."""

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
from areal_x.errors import UserError
from areal_x.monitor import metrics, trackers
from areal_x.monitor.metrics import MetricsWriter
from tests.experiments import tiny_experiment

SETTINGS = {"train.steps": 3, "grpo.loss": "@soft_clip"}
WRITE = """
import json, sys
from pathlib import Path
from areal_x.monitor.metrics import MetricsWriter
from areal_x.monitor.trackers import start
for directory, resumed, steps in json.loads(sys.argv[1]):
    run = Path(directory)
    tracker = start("wandb", run, "additions", {"train.steps": 3, "grpo.loss": "@soft_clip"})
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


def test_wandb_shows_settings_and_rows_and_goes_on_with_a_resumed_run_alone(tmp_path: Path) -> None:
    """Two machines each have a run x-1; the first's is resumed from its second step."""
    pytest.importorskip("wandb")
    here, there = tmp_path / "here" / "x-1", tmp_path / "there" / "x-1"
    for run in (here, there):
        run.mkdir(parents=True)
    work = [(str(here), None, [1, 2, 3]), (str(here), 2, [3, 4]), (str(there), None, [1])]
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WRITE, json.dumps(work)], env=offline, check=True, cwd=Path(__file__).parents[2])
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
