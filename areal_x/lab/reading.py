"""Reads a run's journal without writing to its directory, whether or not the run goes on.

`Journal` creates what is missing and completes what a killed run left. Nothing that only looks may
do either: the log that a killed run leaves is how one sees that it was killed.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.run.group_bytes import SIZE, read_head
from areal_x.run.journal import FILE

LOCKED_SECONDS = 2.0  # that a page waits while another program locks the journal
WAL = f"{FILE}-wal"


@contextmanager
def connection_to(run: Path) -> Iterator[sqlite3.Connection]:
    """Yields a connection that only reads. Each statement sees whole transactions alone: an
    incomplete one at the journal's end, of a run that was killed or is writing, is not there.

    Raises: UserError for a journal that is missing or cannot be read.
    """
    path = run / FILE
    if not path.is_file():
        raise UserError(f"{run} has no {FILE}")
    log = path.with_name(WAL)
    # Without a log nobody writes, and SQLite would create one for reading.
    mode = "mode=ro" if log.exists() else "immutable=1"
    if log.exists() and log.stat().st_size and not os.access(run, os.W_OK):
        raise UserError(
            f"the journal {path} was not closed and is in a folder that cannot be written: copy the"
            " run to a folder that you may write to, and use the copy"
        )
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=LOCKED_SECONDS)
        ) as connection:
            yield connection
    except sqlite3.Error as error:
        raise UserError(f"the journal {path} cannot be read ({error})") from error


def head_of(connection: sqlite3.Connection, ticket: int) -> tuple[dict[str, Any], int]:
    """Returns the header of a group's bytes and where its arrays begin, without reading these."""
    with connection.blobopen("groups", "content", ticket, readonly=True) as blob:
        size = blob.read(SIZE)
        return read_head(size + blob.read(int.from_bytes(size, "little")))


def signature(run: Path) -> tuple[tuple[int, int, int], ...]:
    """Returns inode, size and time of the journal's files, which differ after each transaction."""
    found = []
    for name in (FILE, WAL):
        try:
            stat = (run / name).stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
