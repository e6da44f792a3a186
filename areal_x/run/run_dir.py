"""The run directory: `runs/<name>/` with config.gin, metrics.jsonl, logs/, checkpoints/.

A run is never overwritten: a name that exists is refused unless the run is resumed. A resumed run's
config.gin says what it goes on with; where that is something else than before, the file from before
stays as config-1.gin, config-2.gin …
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

CONFIG, LOCK = "config.gin", ".lock"
# the runs of this process; the system unlocks them however it ends
_locked: dict[Path, IO[str]] = {}
Say = Callable[[str], None]
ChangedSettings = Callable[[str, str], Sequence[str]]


def check(runs: Path, name: str | None, resume: bool) -> str | None:
    """Looks, and makes nothing: a mistake is told before models are loaded. The name, of an unnamed
    resumed run the newest's.

    Raises: UserError when a new run's name is taken, or a resumed run is not there; ConfigError for
    a folder that cannot be written.
    """
    writable("train.runs", runs)
    if name is None:
        return newest_name(runs, "run") if resume else None
    run = runs / name
    taken = _is_taken(run)
    if resume and not taken:
        there = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
        raise UserError(f"there is no run {run} to resume{nearest(run.name, there)}")
    if taken:
        writable("train.name", run)
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
    say: Say = print,
    changed_settings: ChangedSettings = new_lines,
) -> Path:
    """Creates the directory of a new run, or finds that of a resumed one, and writes its config.

    name: None takes `run-1`, `run-2` …  config: the text of a gin file, or a function that returns
    it for the run's name. say: receives the settings that a resumed run changes. changed_settings: returns the
    settings that differ between two configs, one sentence each.

    Raises: as `check`, and UserError if another process writes to the run.
    """
    name = check(runs, name, resume)
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
            say(f"the run goes on with other settings than before: {'; '.join(changed)}")
        (run / CONFIG).write_text(text, encoding="utf-8")
        for place in (run, runs):  # else a loss of power may leave no run for its checkpoints
            checkpoint.flush_directory(place)
    return run


def claim_name(runs: Path, stem: str) -> str:
    """A name that no run has, `stem-1`, `stem-2` …, reserved by making its directory, so that runs
    started together differ.

    Raises: ConfigError for a folder that cannot be written."""
    writable("train.runs", runs)
    with _unwritable("train.runs", runs):
        runs.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(runs, stem), default=0) + 1
        while True:
            try:
                (runs / f"{stem}-{number}").mkdir()
                return f"{stem}-{number}"
            except FileExistsError:
                number += 1


def newest_name(runs: Path, stem: str, say: Say = print) -> str:
    """The last run of this stem that has a checkpoint; says which later ones it passed over.

    Raises: UserError when there is none."""
    names = [f"{stem}-{number}" for number in sorted(_numbers(runs, stem), reverse=True)]
    began = [name for name in names if (runs / name / CONFIG).is_file()]
    found = next((name for name in began if checkpoint.steps(runs / name)), None)
    without = (
        f"{', '.join(began[: began.index(found) if found else None])} ended before a first"
        " checkpoint"
    )
    if found is None:
        why = f"of {without}" if began else f"{runs} holds no run {stem}-1, {stem}-2 …"
        raise UserError(f"there is nothing to resume: {why} (train.name chooses any other run)")
    if found != began[0]:
        say(f"resuming {runs / found}, as {without}")
    return found


def stem_of(file: Path) -> str:
    """What runs of a gin file are called: its directory and its name, as examples of different
    tasks share file names."""
    file = file.resolve()
    return f"{file.parent.name}-{file.stem}" if file.parent.name else file.stem


def put_aside(run: Path) -> Path | None:
    """Renames what is left of a run that ended before its first checkpoint, so that its name is
    free; None where nothing is.

    Raises: UserError when another process writes to it."""
    if not _is_taken(run):
        return None
    _lock(run)
    lock = _locked.pop(run.resolve() / LOCK)
    with lock:
        number = 1 + len(list(run.parent.glob(f"{run.name}.before-*")))
        return run.rename(run.with_name(f"{run.name}.before-{number}"))


def writable(binding: str, place: Path) -> None:
    """Raises: ConfigError for a folder that cannot be written, or could not be made."""
    there = existing(place)
    if not there.is_dir():
        raise ConfigError(
            binding, str(place), f"a folder, or where one can be made ({there} is a file)"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(binding, str(place), f"a folder that can be written ({there} cannot)")


def existing(place: Path) -> Path:
    """The place itself, or the nearest one above it that is there."""
    place = place.absolute()
    return next(p for p in (place, *place.parents) if p.exists())


@contextmanager
def _unwritable(binding: str, place: Path) -> Iterator[None]:
    """What `writable` cannot foresee: root is told that it may, quotas, network file systems."""
    try:
        yield
    except OSError as error:
        wanted = (
            f"a folder that can be written ({error.strerror or type(error).__name__}:"
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
