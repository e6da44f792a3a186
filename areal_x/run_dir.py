"""The run directory: `runs/<name>/` with config.gin, metrics.jsonl, logs/, checkpoints/.

A run is never overwritten: a name that exists is refused unless the run is resumed.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from areal_x.errors import UserError, nearest

CONFIG, LOCK = "config.gin", ".lock"
_locked: dict[Path, IO[str]] = {}  # the runs of this process; the system unlocks them however it ends


def open_run(runs: Path, name: str | None, config: str, *, resume: bool = False) -> Path:
    """Makes the directory of a new run, or finds that of a resumed one, and writes the config into it.

    name: None takes `run-1`, `run-2` …  config: the text of a gin file, see `areal_x.config.config_text`.
    Raises: UserError when a new run's name is taken, a resumed run is not there, or another process writes to it.
    """
    run = runs / (name or claim_name(runs, "run"))
    taken = run.is_dir() and any(run.iterdir())
    if resume and not taken:
        there = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
        raise UserError(f"there is no run {run} to resume{nearest(run.name, there)}")
    if taken and not resume:
        raise UserError(f"the run {run} exists and is not overwritten: choose another train.name, or use --resume")
    run.mkdir(parents=True, exist_ok=True)
    _lock(run)
    for part in ("logs", "checkpoints"):
        (run / part).mkdir(exist_ok=True)
    (run / CONFIG).write_text(config, encoding="utf-8")
    return run


def claim_name(runs: Path, stem: str) -> str:
    """A name that no run has, `stem-1`, `stem-2` …, reserved by making its directory, so that runs started together differ."""
    runs.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(runs, stem), default=0) + 1
    while True:
        try:
            (runs / f"{stem}-{number}").mkdir()
            return f"{stem}-{number}"
        except FileExistsError:
            number += 1


def newest_name(runs: Path, stem: str) -> str:
    """The last run of this stem that began. Raises: UserError when there is none."""
    numbers = [number for number in _numbers(runs, stem) if (runs / f"{stem}-{number}" / CONFIG).is_file()]
    if not numbers:
        raise UserError(
            f"there is nothing to resume: {runs} holds no run {stem}-1, {stem}-2 … (train.name chooses any other run)"
        )
    return f"{stem}-{max(numbers)}"


def stem_of(file: Path) -> str:
    """What runs of a gin file are called: its directory and its name, as examples of different tasks share file names."""
    file = file.resolve()
    return f"{file.parent.name}-{file.stem}" if file.parent.name else file.stem


def _numbers(runs: Path, stem: str) -> list[int]:
    found = (p.name.removeprefix(f"{stem}-") for p in runs.glob("*") if p.is_dir() and p.name.startswith(f"{stem}-"))
    return [int(number) for number in found if number.isdecimal()]


def _lock(run: Path) -> None:
    path = run.resolve() / LOCK
    if path in _locked and path.is_file():
        return
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"another process is writing to the run {run}: wait for it, or choose another train.name") from None
    _locked[path] = lock
