"""Checkpoints that are whole or absent: `checkpoints/<step>/` with state.json and, written last, a manifest of digests.

A checkpoint is written beside its place, flushed to the disk and renamed there, so a crash at any moment leaves the earlier
ones as they were. Reading verifies every digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_x.errors import UserError

MANIFEST, STATE = "manifest.json", "state.json"
UNFINISHED = ".unfinished-"  # the start of the name of what is not yet, or no longer, a checkpoint


def save(run: Path, step: int, write: Callable[[Path], None], state: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes checkpoints/<step> and deletes all but the `keep` newest up to it.

    write: fills the directory it is given. state: what JSON can hold (cursors, random state, version).
    Raises: UserError when the disk is full; whatever `write` raises. Either way the earlier checkpoints are untouched.
    """
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left_over in checkpoints.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    place, unfinished = checkpoints / str(step), checkpoints / f"{UNFINISHED}{step}"
    try:
        unfinished.mkdir()
        write(unfinished)
        (unfinished / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
        files = sorted(p for p in unfinished.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(unfinished)): {"sha256": _flush_and_digest(p), "bytes": p.stat().st_size} for p in files}
        (unfinished / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1), encoding="utf-8")
        _flush_and_digest(unfinished / MANIFEST)
        for directory in (unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())):
            _flush_directory(directory)
        if place.exists():  # damaged, or of a run that was resumed from before it
            place.rename(checkpoints / f"{UNFINISHED}{step}-replaced")
        unfinished.rename(place)
        _flush_directory(checkpoints)
    except BaseException as error:
        needed = sum(p.stat().st_size for p in unfinished.rglob("*") if p.is_file())
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_disk_full(error):
            raise UserError(
                f"the checkpoint of step {step} could not be saved because the disk of {checkpoints} is full "
                f"(it had {needed / 1e6:.1f} MB when it stopped): the earlier checkpoints are whole; make room and use --resume"
            ) from error
        raise
    shutil.rmtree(checkpoints / f"{UNFINISHED}{step}-replaced", ignore_errors=True)
    for old in [s for s in steps(run) if s <= step][:-keep]:
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        shutil.rmtree((checkpoints / str(old)).rename(checkpoints / f"{UNFINISHED}{old}-old"))
    return place


def newest(run: Path, say: Callable[[str], None] = print) -> tuple[int, Path, dict[str, Any]]:
    """The step, directory and state of the newest checkpoint whose digests hold; says which damaged ones it passed over.

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
    return sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal() and p.is_dir())


def find_damage(path: Path) -> str:
    """The first file that is not what the manifest says, and how; empty when all are."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if STATE not in expected:
        return f"{MANIFEST} does not list {STATE}"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if _digest(file) != digest:
            return f"{name} does not have its recorded sha256"
    return ""


def is_disk_full(error: BaseException) -> bool:
    """Also where a library written in another language gives only the words (safetensors)."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in full
    return any(f"os error {number}" in str(error) for number in full) or os.strerror(errno.ENOSPC) in str(error)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush_and_digest(file: Path) -> str:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
