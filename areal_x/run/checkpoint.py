"""Checkpoints that are whole or absent: `checkpoints/<step>/` with state.json and, written last, a
manifest of digests.

A checkpoint is written beside its place, flushed to the disk and renamed there, so a crash at any
moment leaves the earlier ones as they were. Reading verifies every digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.runtime.waits import waiting

MANIFEST, STATE = "manifest.json", "state.json"
UNFINISHED = ".unfinished-"  # the start of the name of what is not yet, or no longer, a checkpoint


# until what goes on in the background is done; raises what went wrong there
Wait = Callable[[], None]
Write = Callable[[Path], Wait | None]  # fills the directory it is given, or begins to


class Saver:
    """Saves the checkpoints of a run. What is written in the background is completed on a thread
    while the run goes on, one checkpoint at a time; leaving the context waits for it.

    keep: of the newest, how many stay. report: told when a checkpoint is whole.
    """

    def __init__(self, run: Path, keep: int, report: Callable[[str], None]) -> None:
        self._run, self._keep, self._report = run, keep, report
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        with self._thread:
            self.wait()

    def save(self, step: int, write: Write, state: Mapping[str, Any]) -> None:
        """See `checkpoint.save`; the checkpoint is whole when this returns, unless `write` left
        something to the background. Raises: what went wrong with the checkpoint before, too."""
        self.wait()
        with waiting("the run", f"the checkpoint of step {step} to be written"):
            begun = begin(self._run, step, write)
            if begun.wait is None:
                self._complete(begun, state)
            else:
                self._pending = self._thread.submit(self._complete, begun, state)

    def wait(self) -> None:
        """Until no checkpoint is being completed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with waiting("the run", "the checkpoint before to be completed"):
                pending.result()

    def _complete(self, begun: Begun, state: Mapping[str, Any]) -> None:
        complete(begun, state, self._keep)
        self._report(f"checkpoint of step {begun.step} saved")


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is being written. wait: for what is written in the background, None where
    all is there."""

    run: Path
    step: int
    wait: Wait | None

    @property
    def place(self) -> Path:
        return self.run / "checkpoints" / str(self.step)

    @property
    def unfinished(self) -> Path:
        return self.run / "checkpoints" / f"{UNFINISHED}{self.step}"


def save(run: Path, step: int, write: Write, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes checkpoints/<step> and deletes all but the `keep` newest up to it.

    state: what JSON can hold (cursors, random state, version). Raises: UserError when the disk is
    full; whatever `write` raises. Either way the earlier checkpoints are untouched.
    """
    return complete(begin(run, step, write), state, keep)


def begin(run: Path, step: int, write: Write) -> Begun:
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left_over in checkpoints.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    begun = Begun(run, step, None)
    with _whole_or_absent(begun):
        begun.unfinished.mkdir()
        return Begun(run, step, write(begun.unfinished))


def complete(begun: Begun, state: Mapping[str, Any], keep: int) -> Path:
    unfinished, place, checkpoints = begun.unfinished, begun.place, begun.place.parent
    replaced = checkpoints / f"{UNFINISHED}{begun.step}-replaced"
    with _whole_or_absent(begun):
        if begun.wait is not None:
            begun.wait()
        (unfinished / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
        files = sorted(p for p in unfinished.rglob("*") if p.is_file())
        manifest = {
            str(p.relative_to(unfinished)): {
                "sha256": _flush_and_digest(p),
                "bytes": p.stat().st_size,
            }
            for p in files
        }
        (unfinished / MANIFEST).write_text(
            json.dumps({"step": begun.step, "files": manifest}, indent=1), encoding="utf-8"
        )
        _flush_and_digest(unfinished / MANIFEST)
        for directory in (unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())):
            flush_directory(directory)
        if place.exists():  # damaged, or of a run that was resumed from before it
            place.rename(replaced)
        unfinished.rename(place)
        flush_directory(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in [s for s in steps(begun.run) if s <= begun.step][:-keep]:
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        shutil.rmtree((checkpoints / str(old)).rename(checkpoints / f"{UNFINISHED}{old}-old"))
    return place


@contextmanager
def _whole_or_absent(begun: Begun) -> Iterator[None]:
    """Removes what there is of a checkpoint that could not be written."""
    try:
        yield
    except BaseException as error:
        needed = sum(p.stat().st_size for p in begun.unfinished.rglob("*") if p.is_file())
        shutil.rmtree(begun.unfinished, ignore_errors=True)
        if is_disk_full(error):
            raise UserError(
                f"the checkpoint of step {begun.step} could not be saved because the disk of"
                f" {begun.place.parent} is full (it had {needed / 1e6:.1f} MB when it stopped): the"
                " earlier checkpoints are whole; make room and use --resume"
            ) from error
        raise


def newest(run: Path, say: Callable[[str], None] = print) -> tuple[int, Path, dict[str, Any]]:
    """The step, directory and state of the newest checkpoint whose digests hold; says which damaged
    ones it passed over.

    Raises: UserError when no whole checkpoint is left.
    """
    refused = []
    for step in (there := steps(run))[::-1]:
        path = run / "checkpoints" / str(step)
        damage = find_damage(path)
        if not damage:
            state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
            return step, path, state
        refused.append(f"{path} is damaged ({damage})")
        if step != there[0]:
            say(f"checkpoint {refused[-1]}: trying the one before it")
    why = ": " + "; ".join(refused) if refused else ""
    raise UserError(f"{run} has no checkpoint to resume from{why}")


def steps(run: Path) -> list[int]:
    """The steps that have a checkpoint, rising."""
    return sorted(
        int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal() and p.is_dir()
    )


def find_damage(path: Path) -> str:
    """The first file that is not what the manifest says, and how; empty when all are."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if STATE not in expected:
        return f"{MANIFEST} does not list {STATE}"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        try:
            found = _digest(file)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != digest:
            return f"{name} does not have its recorded sha256"
    return ""


def is_disk_full(error: BaseException) -> bool:
    """Also where a library written in another language gives only the words (safetensors)."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in full
    return any(f"os error {number}" in str(error) for number in full) or os.strerror(
        errno.ENOSPC
    ) in str(error)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush_and_digest(file: Path) -> str:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()


def flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
