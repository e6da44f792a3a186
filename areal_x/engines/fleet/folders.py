"""Folders that belong to living processes: each holds a lock in its folder for as long as it lives.

The kernel releases the lock with the process, however that ends; a process id in the name could belong
to another container or to a newer process.

Used inside servers too: it imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "areal_x-"
LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


def default_parent() -> Path:
    """Returns shared memory if there is any, which is written once, read by every server of this
    machine and never touches a disk; else the temporary directory."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_left_behind(parent: Path) -> None:
    """Removes the folders below `parent` whose processes ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, another user's, or on a file system without locks
