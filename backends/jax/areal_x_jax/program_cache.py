"""The cache of compiled programs on disk, within a bound of size."""

from __future__ import annotations

from pathlib import Path

LIMIT = 2 * 2**30
"""Bytes of compiled programs that a start leaves on disk. The arithmetic example's are 0.8 MB."""


def prune(folder: Path, limit: int = LIMIT) -> None:
    """Deletes the files that were read or written longest ago until the rest have at most `limit`
    bytes.

    JAX's own bound of size takes a lock at each program, with a time limit, and cannot count a
    folder that it had filled without a bound. A program that another process deletes is compiled.
    """
    found = []
    for file in folder.glob("*"):
        try:
            of = file.stat()
        except OSError:  # another process was faster
            continue
        found.append((max(of.st_atime, of.st_mtime), of.st_size, file))
    size = sum(bytes_ for _, bytes_, _ in found)
    for _, bytes_, file in sorted(found):
        if size <= limit:
            break
        try:
            file.unlink(missing_ok=True)
        except OSError:  # another user's
            continue
        size -= bytes_
