"""Each file of a run is damaged in each way: no command that reads it ends in a traceback."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_x import export, replay, train
from areal_x.errors import UserError
from areal_x.monitor import metrics, plot
from tests.thorough import further

TO_RUN = """
import tests.check_configurables
model.path = '{model}'
train.backend = 'torch'
train.dataset = @checked.tasks()
train.workflow = @single_turn()
single_turn.reward = @checked.ones
single_turn.reward_workers = 1
sampling.max_tokens = 4
train.row_length = 32
train.groups_per_step = 1
train.group_size = 2
train.max_staleness = 0
train.checkpoint_every = 1
train.runs = '{runs}'
train.name = 'run'
"""
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "other bytes": lambda file: file.write_bytes(b"\xff{]\n" * 40),
    "another kind": lambda file: file.write_bytes(b"[[1]]\n[[2]]\n"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "missing": lambda file: file.unlink(),
}


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with its file."""
    pytest.importorskip("areal_x_torch")
    place = tmp_path_factory.mktemp("whole")
    (place / "run.gin").write_text(TO_RUN.format(model=tiny_model_dir, runs=place))
    assert train.main([str(place / "run.gin"), "-b", "train.steps = 2"]) == 0
    return place


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plots of a run that was read take as long as all else, and nothing that could be damaged."""
    monkeypatch.setattr(plot, "plot", lambda *_: None)
    monkeypatch.setattr(plot, "plot_timeline", lambda *_: None)


def copied(whole: Path, to: Path) -> Path:
    shutil.copytree(whole / "run", to / "run")
    for file in (whole / "run.gin", whole / "run" / "config.gin"):
        text = file.read_text().replace(str(whole), str(to))
        (to / file.relative_to(whole)).write_text(text)
    return to


def resume(at: Path) -> int:
    return train.main([str(at / "run.gin"), "-b", "train.steps = 2", "--resume"])


def replayed(at: Path) -> int:
    return replay.main([str(at / "run")])


def exported(at: Path) -> int:
    return export.main([str(at / "run"), str(at / "plain")])


def checkpoint_exported(at: Path) -> int:
    return export.main([str(at / "run" / "checkpoints" / "2"), str(at / "plain")])


def trainer_exported(at: Path) -> int:
    """A directory that was copied out of its checkpoint, without its digests."""
    shutil.copytree(at / "run" / "checkpoints" / "2" / "trainer", at / "trainer")
    return export.main([str(at / "trainer"), str(at / "plain")])


NEWEST = "run/checkpoints/2"
READ: list[tuple[Callable[[Path], int], str]] = [
    *((resume, file) for file in ("run/metrics.jsonl", "run/journal.sqlite", "run/config.gin", f"{NEWEST}/manifest.json")),
    *((replayed, file) for file in ("run/metrics.jsonl", "run/journal.sqlite", "run/config.gin")),
    *((exported, f"{NEWEST}/{file}") for file in ("manifest.json", "state.json", "trainer/trainer.json")),
    *((checkpoint_exported, f"{NEWEST}/{file}") for file in ("manifest.json", "state.json", "trainer/model.safetensors")),
    *((trainer_exported, f"{NEWEST}/trainer/{file}") for file in ("trainer.json", "model.safetensors", "config.json")),
]


@pytest.mark.parametrize("command, file", READ, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("damage", ["cut short", "missing", *further("empty", "other bytes", "another kind", "a folder")])
def test_a_damaged_file_is_one_sentence_or_nothing(
    command: Callable[[Path], int],
    file: str,
    damage: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = copied(whole, tmp_path)
    DAMAGES[damage](at / file)
    status, said = command(at), capsys.readouterr().err
    assert "Traceback" not in said
    errors = re.findall("^error: .+", said, flags=re.MULTILINE)
    assert (status, len(errors)) in ((0, 0), (1, 1)), said
    assert all(str(at) in error for error in errors)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_never_exported(damage: str, whole: Path, tmp_path: Path) -> None:
    at = copied(whole, tmp_path)
    DAMAGES[damage](at / NEWEST / "trainer" / "model.safetensors")
    assert checkpoint_exported(at) == trainer_exported(at) == 1
    assert sorted(path.name for path in at.iterdir()) == ["run", "run.gin", "trainer"]  # nothing half written
    assert exported(at) == 0  # of the checkpoint before


def test_the_line_of_metrics_that_is_damaged_is_named(whole: Path, tmp_path: Path) -> None:
    at = copied(whole, tmp_path)
    file = at / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for damaged in ("{]\n", "[]\n", "3\n", '{"reward": 1}\n', '{"step": "1"}\n', "[" * 100_000 + "\n"):
        file.write_text("".join([lines[0], damaged, *lines[1:]]))
        with pytest.raises(UserError, match=rf"{re.escape(str(file))}:2 is damaged"):
            metrics.read(at / "run")
