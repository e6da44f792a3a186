"""A run is named once, never overwritten, and written to by one process."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_x.errors import UserError
from areal_x.monitor.metrics import MetricsWriter, read
from areal_x.run_dir import claim_name, newest_name, open_run, stem_of

OPEN = "import os, sys; from pathlib import Path; from areal_x.run_dir import open_run\n"


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
        open_run(tmp_path, name, "")
    assert newest_name(tmp_path, "grpo") == "grpo-10"  # grpo-11 was claimed but never began
    with pytest.raises(UserError, match="nothing to resume"):
        newest_name(tmp_path, "sft")


def test_runs_that_start_together_get_different_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: claim_name(tmp_path, "grpo"), range(32)))
    assert len(set(names)) == 32


def test_a_claimed_name_can_be_opened_as_a_new_run(tmp_path: Path) -> None:
    assert open_run(tmp_path, claim_name(tmp_path, "grpo"), "").name == "grpo-1"
    assert open_run(tmp_path, None, "").name == "run-1"


def test_examples_that_share_a_file_name_have_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stem_of(Path("examples/arithmetic/grpo.gin")) == "arithmetic-grpo"
    assert stem_of(Path("examples/gsm8k/grpo.gin")) == "gsm8k-grpo"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert stem_of(Path("grpo.gin")) == "here-grpo"
