"""The notes of a run: notes.md in its directory, the one file that the page writes."""

from __future__ import annotations

import os
from pathlib import Path

from areal_x.errors import UserError

FILE = "notes.md"
MOST_BYTES = 1 << 20
NEVER = "0"  # the version of notes that were not written yet


class Conflict(UserError):
    """Somebody else changed the notes."""


def read(run: Path) -> tuple[str, str]:
    """Returns the notes and their version, which every change changes."""
    path = run / FILE
    try:
        with path.open("rb") as file:
            version = str(os.fstat(file.fileno()).st_mtime_ns)
            return file.read(MOST_BYTES).decode("utf-8", "replace"), version
    except FileNotFoundError:
        return "", NEVER


def write(run: Path, text: str, version: str) -> str:
    """Writes the notes, whole or not at all, and returns their new version. version: of what was
    changed.

    Raises: Conflict if that is not the present one, UserError for notes that are too long or cannot
    be written.
    """
    content = text.encode("utf-8", "replace")
    if len(content) > MOST_BYTES:
        raise UserError(f"the notes have {len(content):,} bytes, of at most {MOST_BYTES:,}")
    if read(run)[1] != version:
        raise Conflict("the notes were changed meanwhile: copy yours, and load the page again")
    unfinished = run / f"{FILE}.new"
    try:
        unfinished.write_bytes(content)
        unfinished.replace(run / FILE)
    except OSError as error:
        raise UserError(f"{run / FILE} cannot be written ({error.strerror})") from error
    return read(run)[1]
