"""A run is named once, never overwritten, and written to by one process."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.monitor.metrics import MetricsWriter, read
from areal_x.run import checkpoint
from areal_x.run.run_dir import claim_name, newest_name, open_run, run_stem

OPEN = "import os, sys; from pathlib import Path; from areal_x.run.run_dir import open_run\n"


def test_a_new_run_has_its_config_and_its_places(tmp_path: Path) -> None:
    run = open_run(tmp_path / "runs", "first", "train.steps = 3\n")
    assert run == tmp_path / "runs" / "first"
    assert (run / "config.gin").read_text() == "train.steps = 3\n"
    assert (run / "logs").is_dir()
    assert (run / "checkpoints").is_dir()


def test_an_existing_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    run = open_run(tmp_path, "mine", "old")
    with MetricsWriter(run) as metrics:
        metrics.write({"step": 1})
    with pytest.raises(UserError, match="mine exists and is not overwritten"):
        open_run(tmp_path, "mine", "new")
    assert (run / "config.gin").read_text() == "old"
    assert open_run(tmp_path, "mine", "new", resume=True) == run
    assert (run / "config.gin").read_text() == "new"
    assert read(run) == [{"step": 1}]


def test_resuming_a_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    open_run(tmp_path, "arithmetic-1", "")
    with pytest.raises(UserError, match=r"no run .*arithmetik-1 to resume; did you mean 'arithmetic-1'"):
        open_run(tmp_path, "arithmetik-1", "", resume=True)
    with pytest.raises(UserError, match="no run"):
        open_run(tmp_path / "nowhere", "arithmetic-1", "", resume=True)


def test_a_run_that_another_process_writes_to_is_refused(tmp_path: Path) -> None:
    open_run(tmp_path, "busy", "")
    resume = OPEN + "open_run(Path(sys.argv[1]), 'busy', '', resume=True)"
    other = subprocess.run([sys.executable, "-c", resume, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another process is writing to the run" in other.stderr


def test_a_run_whose_process_was_killed_can_be_resumed(tmp_path: Path) -> None:
    code = OPEN + "open_run(Path(sys.argv[1]), 'mine', ''); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert open_run(tmp_path, "mine", "", resume=True).is_dir()


def test_names_are_numbered_and_the_newest_is_the_highest(tmp_path: Path) -> None:
    names = [claim_name(tmp_path, "grpo") for _ in range(11)]
    assert names == [f"grpo-{n}" for n in range(1, 12)]
    (tmp_path / "grpo-x").mkdir()
    assert claim_name(tmp_path, "other") == "other-1"
    for name in ("grpo-2", "grpo-10", "other-1"):
        checkpoint.save(open_run(tmp_path, name, ""), 1, lambda path: None, {})
    said: list[str] = []
    assert newest_name(tmp_path, "grpo", said.append) == "grpo-10"  # grpo-11 was claimed but never began
    assert said == []
    with pytest.raises(UserError, match=r"nothing to resume: .* has no run sft-1, sft-2 …"):
        newest_name(tmp_path, "sft")


def test_a_run_whose_start_failed_is_passed_over_and_named(tmp_path: Path) -> None:
    checkpoint.save(open_run(tmp_path, "grpo-1", ""), 1, lambda path: None, {})
    for name in ("grpo-2", "grpo-3"):
        open_run(tmp_path, name, "")
    said: list[str] = []
    assert newest_name(tmp_path, "grpo", said.append) == "grpo-1"
    assert said == [f"resuming {tmp_path}/grpo-1, as grpo-3, grpo-2 ended before a first checkpoint"]
    open_run(tmp_path, "sft-1", "")
    with pytest.raises(UserError, match=r"nothing to resume: sft-1 ended before a first checkpoint"):
        newest_name(tmp_path, "sft")


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mount = shutil.which("mount")
    unwritable = [tmp_path / "file", tmp_path / "file" / "runs"]
    locked = tmp_path / "locked"
    locked.mkdir()
    can_mount = (
        mount and not subprocess.run([mount, "-t", "tmpfs", "none", locked], capture_output=True, check=False).returncode
    )
    try:
        if can_mount:
            (locked / "old" / "checkpoints" / "1").mkdir(parents=True)
            subprocess.run([mount, "-o", "remount,ro", locked], check=True)
            unwritable.append(locked)
            with pytest.raises(ConfigError, match=r"train\.runs = .* it must be a folder that can be written"):
                open_run(locked, "old", "", resume=True)
        for runs in unwritable:
            for make in (
                partial(claim_name, stem="grpo"),
                partial(open_run, name="new", config=""),
                partial(open_run, name=None, config=""),
            ):
                with pytest.raises(ConfigError, match=r"train\.runs = .* it must be a folder"):
                    make(runs)
    finally:
        if can_mount:
            subprocess.run(["umount", "--lazy", locked], check=True)


def test_what_only_the_system_knows_to_be_unwritable_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"train\.runs = .* a folder that can be written to \(No space left on device: "):
        open_run(tmp_path, "new", "")


def test_runs_that_start_together_get_different_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: claim_name(tmp_path, "grpo"), range(32)))
    assert len(set(names)) == 32


def test_a_claimed_name_can_be_opened_as_a_new_run(tmp_path: Path) -> None:
    assert open_run(tmp_path, claim_name(tmp_path, "grpo"), "").name == "grpo-1"
    assert open_run(tmp_path, None, "").name == "run-1"


def test_examples_that_share_a_file_name_have_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_stem(Path("examples/arithmetic/grpo.gin")) == "arithmetic-grpo"
    assert run_stem(Path("examples/gsm8k/grpo.gin")) == "gsm8k-grpo"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run_stem(Path("grpo.gin")) == "here-grpo"
