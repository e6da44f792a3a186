"""Whether processes still run."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """True if a process has not ended; a zombie has, and only awaits collection by its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def gone(pid: int) -> bool:
    """True if the process of this number has ended."""
    try:
        return not lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
