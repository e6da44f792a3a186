"""A run's process is restarted after a crash, and not after what a restart would repeat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_x.run.retries import run_with_retries

# Counts its starts in a file and ends as the word of its turn says: a status, a signal, or a step and a status.
PROCESS = """
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
starts = run / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
word = sys.argv[1 + len(starts.read_text())]
if word == "waits":
    time.sleep(60)
if word.startswith("step"):
    (run / "metrics.jsonl").open("a").write("{}\\n")
    word = word.removeprefix("step")
if word == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(word))
"""


def outcome(run: Path, retries: int, *words: str) -> tuple[int, int, list[str]]:
    """The status, the number of starts, and what was reported."""
    told: list[str] = []
    command = [sys.executable, "-c", PROCESS, str(run), *words]
    status = run_with_retries(command, run, retries, told.append, pause=lambda _: None)
    return status, len((run / "starts").read_text()), told


@pytest.mark.parametrize(
    "retries, words, status, starts",
    [
        (3, ("killed", "step1", "0"), 0, 3),  # a crash, an error after a step, the end
        (3, ("1", "0"), 1, 1),  # a mistake, which would be repeated
        (3, ("step1", "1", "0"), 1, 2),  # the same step fails again
        (1, ("killed", "killed", "0"), 137, 2),
        (3, ("130", "0"), 130, 1),  # Ctrl-C
    ],
)
def test_a_run_is_restarted_after_a_crash_alone(
    tmp_path: Path, retries: int, words: tuple[str, ...], status: int, starts: int
) -> None:
    assert outcome(tmp_path, retries, *words)[:2] == (status, starts)


def test_each_retry_is_reported_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "8").mkdir(parents=True)
    _, _, told = outcome(tmp_path, 2, "killed", "0")
    assert told == ["the run was killed by signal 9; it continues from step 8 (retry 1 of 2)"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_run_once_and_ends_it(tmp_path: Path, sent: signal.Signals) -> None:
    code = (
        "import sys; from pathlib import Path; from areal_x.run.retries import run_with_retries;"
        "sys.exit(run_with_retries(sys.argv[2:], Path(sys.argv[1]), 3, print) % 256)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), sys.executable, "-c", PROCESS, str(tmp_path), "waits", "0"]
    with subprocess.Popen(command) as supervisor:
        while not (tmp_path / "starts").exists():
            time.sleep(0.01)
        os.kill(supervisor.pid, sent)
        assert supervisor.wait(30) != 0
    assert len((tmp_path / "starts").read_text()) == 1
