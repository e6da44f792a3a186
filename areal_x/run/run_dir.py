"""The run directory: `runs/<name>/` with config.gin, metrics.jsonl, logs/, checkpoints/.

A run is never overwritten: an existing name is refused unless the run is resumed. A resumed run's
config.gin has its current settings; if they differ from the earlier ones, the earlier file is kept
as config-1.gin, config-2.gin …
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from areal_x.errors import ConfigError, UserError, nearest
from areal_x.run import checkpoint

CONFIG = "config.gin"
LOCK = ".lock"
# The runs of this process. The system unlocks them when the process ends, however it ends.
_locked: dict[Path, IO[str]] = {}
Message = Callable[[str], None]
ChangedSettings = Callable[[str, str], Sequence[str]]


def check_name(runs: Path, name: str | None, resume: bool) -> str | None:
    """Returns the run's name; for a resumed run without one, the newest run's. Creates nothing, and
    is called before models are loaded.

    Raises: UserError if a new run's name is taken or a resumed run does not exist; ConfigError for
    a folder that cannot be written to.
    """
    check_writable("train.runs", runs)
    if name is None:
        return newest_name(runs, "run") if resume else None
    run = runs / name
    taken = _is_taken(run)
    if resume and not taken:
        there = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
        raise UserError(f"there is no run {run} to resume{nearest(run.name, there)}")
    if taken:
        check_writable("train.name", run)
    if taken and not resume:
        raise UserError(
            f"the run {run} exists and is not overwritten: choose another train.name, or use"
            " --resume"
        )
    return name


def new_lines(before: str, now: str) -> Sequence[str]:
    """Returns the lines of a text that an earlier one lacks."""
    return sorted(set(now.splitlines()) - set(before.splitlines()))


def open_run(
    runs: Path,
    name: str | None,
    config: str | Callable[[str], str],
    *,
    resume: bool = False,
    message: Message = print,
    changed_settings: ChangedSettings = new_lines,
) -> Path:
    """Creates the directory of a new run, or finds that of a resumed one, and writes its config.

    name: None takes `run-1`, `run-2` …  config: the text of a gin file, or a function that returns
    it for the run's name. message: called with the settings that a resumed run changes.
    changed_settings: returns the settings that differ between two configs, one sentence each.

    Raises: as `check_name`, and UserError if another process writes to the run.
    """
    name = check_name(runs, name, resume)
    with _unwritable("train.runs", runs):
        run = runs / (name or claim_name(runs, "run"))
        run.mkdir(parents=True, exist_ok=True)
        _lock(run)
        for part in ("logs", "checkpoints"):
            (run / part).mkdir(exist_ok=True)
        text = config if isinstance(config, str) else config(run.name)
        if resume and (changed := _changes(run, text, changed_settings)):
            kept = 1 + len(list(run.glob("config-*.gin")))
            (run / CONFIG).rename(run / f"config-{kept}.gin")
            message(f"the run continues with changed settings: {'; '.join(changed)}")
        (run / CONFIG).write_text(text, encoding="utf-8")
        for place in (run, runs):  # so that a power failure leaves the run with its checkpoints
            checkpoint.flush_directory(place)
    return run


def claim_name(runs: Path, stem: str) -> str:
    """Returns a name that no run has, `stem-1`, `stem-2` …, reserved by creating its directory, so
    that runs started at the same time get different names.

    Raises: ConfigError for a folder that cannot be written to.
    """
    check_writable("train.runs", runs)
    with _unwritable("train.runs", runs):
        runs.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(runs, stem), default=0) + 1
        while True:
            try:
                (runs / f"{stem}-{number}").mkdir()
                return f"{stem}-{number}"
            except FileExistsError:
                number += 1


def newest_name(runs: Path, stem: str, message: Message = print) -> str:
    """Returns the newest run of this stem that has a checkpoint. `message` is called with the later
    ones that have none.

    Raises: UserError if there is none.
    """
    names = [f"{stem}-{number}" for number in sorted(_numbers(runs, stem), reverse=True)]
    began = [name for name in names if (runs / name / CONFIG).is_file()]
    found = next((name for name in began if checkpoint.steps(runs / name)), None)
    without = (
        f"{', '.join(began[: began.index(found) if found else None])} ended before a first"
        " checkpoint"
    )
    if found is None:
        why = without if began else f"{runs} has no run {stem}-1, {stem}-2 …"
        raise UserError(f"there is nothing to resume: {why} (train.name chooses any other run)")
    if found != began[0]:
        message(f"resuming {runs / found}, as {without}")
    return found


def run_stem(file: Path) -> str:
    """Returns the stem of the names of a gin file's runs: the file's directory and its name, because
    examples of different tasks share file names."""
    file = file.resolve()
    return f"{file.parent.name}-{file.stem}" if file.parent.name else file.stem


def set_aside(run: Path) -> Path | None:
    """Renames the directory of a run that ended before its first checkpoint, to free its name.
    Returns the new path; None if there is no such directory.

    Raises: UserError if another process writes to it.
    """
    if not _is_taken(run):
        return None
    _lock(run)
    lock = _locked.pop(run.resolve() / LOCK)
    with lock:
        number = 1 + len(list(run.parent.glob(f"{run.name}.before-*")))
        return run.rename(run.with_name(f"{run.name}.before-{number}"))


def check_writable(binding: str, place: Path) -> None:
    """Raises: ConfigError for a folder that cannot be written to or created."""
    found = nearest_existing(place)
    if not found.is_dir():
        raise ConfigError(
            binding, str(place), f"a folder, or where one can be created ({found} is a file)"
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(binding, str(place), f"a folder that can be written to ({found} cannot)")


def nearest_existing(place: Path) -> Path:
    """Returns the path itself, or its nearest parent that exists."""
    place = place.absolute()
    return next(p for p in (place, *place.parents) if p.exists())


@contextmanager
def _unwritable(binding: str, place: Path) -> Iterator[None]:
    """Raises: ConfigError in place of an OSError, for what `check_writable` cannot foresee: root's
    permissions, quotas, network file systems."""
    try:
        yield
    except OSError as error:
        wanted = (
            f"a folder that can be written to ({error.strerror or type(error).__name__}:"
            f" {error.filename or place})"
        )
        raise ConfigError(binding, str(place), wanted) from error


def _changes(run: Path, text: str, changed_settings: ChangedSettings) -> Sequence[str]:
    try:
        return changed_settings((run / CONFIG).read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError, SyntaxError):
        return []


def _is_taken(run: Path) -> bool:
    return run.is_dir() and any(run.iterdir())


def _numbers(runs: Path, stem: str) -> list[int]:
    found = (
        p.name.removeprefix(f"{stem}-")
        for p in runs.glob("*")
        if p.is_dir() and p.name.startswith(f"{stem}-")
    )
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
        raise UserError(
            f"another process is writing to the run {run}: wait for it, or choose another"
            " train.name"
        ) from None
    _locked[path] = lock
