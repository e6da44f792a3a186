"""Checkpoints that are complete or absent: `checkpoints/<step>/` with state.json and, written last,
a manifest of digests.

A checkpoint is written under a temporary name, flushed to disk and renamed, so a crash at any
moment leaves the earlier ones intact. Reading verifies every digest.
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

MANIFEST = "manifest.json"
STATE = "state.json"
UNFINISHED = ".unfinished-"  # prefix of directories that are not yet, or no longer, a checkpoint

# Blocks until background writes are done, and raises their error.
Wait = Callable[[], None]
# Fills the given directory, or starts to in the background and returns a Wait.
Write = Callable[[Path], Wait | None]


class Saver:
    """Saves the checkpoints of a run. Background writes are completed on a thread while the run goes
    on, one checkpoint at a time; leaving the context waits for the last.

    keep: number of newest checkpoints to keep. message: called with a sentence about each complete
    checkpoint.
    """

    def __init__(self, run: Path, keep: int, message: Callable[[str], None]) -> None:
        self._run = run
        self._keep = keep
        self._message = message
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        with self._thread:
            self.wait()

    def save(self, step: int, write: Write, state: Mapping[str, Any]) -> None:
        """Saves as `checkpoint.save` does. The checkpoint is complete on return unless `write` left
        work to the background.

        Raises: also the error of the previous checkpoint.
        """
        self.wait()
        with waiting("the run", f"the checkpoint of step {step} to be written"):
            begun = begin(self._run, step, write)
            if begun.wait is None:
                self._complete(begun, state)
            else:
                self._pending = self._thread.submit(self._complete, begun, state)

    def wait(self) -> None:
        """Waits for the checkpoint that is being completed, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with waiting("the run", "the checkpoint before to be completed"):
                pending.result()

    def _complete(self, begun: Begun, state: Mapping[str, Any]) -> None:
        complete(begun, state, self._keep)
        self._message(f"checkpoint of step {begun.step} saved")


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is being written."""

    run: Path
    step: int

    wait: Wait | None
    """Waits for background writes; None if there are none."""

    @property
    def place(self) -> Path:
        return self.run / "checkpoints" / str(self.step)

    @property
    def unfinished(self) -> Path:
        return self.run / "checkpoints" / f"{UNFINISHED}{self.step}"


def save(run: Path, step: int, write: Write, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes checkpoints/<step> and deletes all but the `keep` newest up to it.

    state: JSON data (cursors, random state, version).

    Raises: UserError if the disk is full; whatever `write` raises. Either way the earlier
    checkpoints are untouched.
    """
    return complete(begin(run, step, write), state, keep)


def begin(run: Path, step: int, write: Write) -> Begun:
    """Creates the directory and starts to fill it. Deletes what earlier attempts left."""
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left_over in checkpoints.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    begun = Begun(run, step, None)
    with _complete_or_absent(begun):
        begun.unfinished.mkdir()
        return Begun(run, step, write(begun.unfinished))


def complete(begun: Begun, state: Mapping[str, Any], keep: int) -> Path:
    """Waits for background writes, adds state and manifest, and renames the directory to its final
    name, which it returns."""
    unfinished, place, checkpoints = begun.unfinished, begun.place, begun.place.parent
    replaced = checkpoints / f"{UNFINISHED}{begun.step}-replaced"
    with _complete_or_absent(begun):
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
        if place.exists():  # damaged, or from before the run was resumed at an earlier step
            place.rename(replaced)
        unfinished.rename(place)
        flush_directory(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in [s for s in steps(begun.run) if s <= begun.step][:-keep]:
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        shutil.rmtree((checkpoints / str(old)).rename(checkpoints / f"{UNFINISHED}{old}-old"))
    return place


@contextmanager
def _complete_or_absent(begun: Begun) -> Iterator[None]:
    """Deletes a checkpoint that could not be written."""
    try:
        yield
    except BaseException as error:
        needed = sum(p.stat().st_size for p in begun.unfinished.rglob("*") if p.is_file())
        shutil.rmtree(begun.unfinished, ignore_errors=True)
        if is_disk_full(error):
            raise UserError(
                f"the checkpoint of step {begun.step} could not be saved because the disk of"
                f" {begun.place.parent} is full (it had {needed / 1e6:.1f} MB when it stopped): the"
                " earlier checkpoints are intact; make room and use --resume"
            ) from error
        raise


def newest(run: Path, message: Callable[[str], None] = print) -> tuple[int, Path, dict[str, Any]]:
    """Returns step, directory and state of the newest intact checkpoint. `message` is called for
    each damaged one before it.

    Raises: UserError if none is intact.
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
            message(f"checkpoint {refused[-1]}: trying the one before it")
    why = ": " + "; ".join(refused) if refused else ""
    raise UserError(f"{run} has no checkpoint to resume from{why}")


def steps(run: Path) -> list[int]:
    """Returns the steps that have a checkpoint, in ascending order."""
    return sorted(
        int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal() and p.is_dir()
    )


def find_damage(path: Path) -> str:
    """Returns a description of the first file that differs from the manifest; "" if none does."""
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
    """True for "no space left" and "quota exceeded", also in the message of a library that raises no
    OSError (safetensors)."""
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
    """Brings a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
