"""The limit of files, and so of connections, that this process may have open (`ulimit -n`)."""

from __future__ import annotations

import errno
import os
import socket
import sys
from contextlib import suppress

# For everything but requests to servers: logs, checkpoints, journal, pipes, agents' connections.
RESERVED = 256
MOST = 2**20  # if the system sets no limit


def raise_limit() -> None:
    """Raises this process's soft limit to the hard limit; shells set only 1,024. Only commands call
    it, because the limit applies to the whole process and its children."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the kernel's own bound may be lower (macOS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allowed() -> int:
    """Returns how many files this process may open."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def connections() -> int:
    """Returns how many requests to servers may be in flight at once."""
    return max(1, allowed() - min(RESERVED, allowed() // 2))


def enough_for(requests: int) -> str | None:
    """Returns a sentence about what to set if fewer requests can be in flight; None if they can."""
    most = connections()
    if most >= requests:
        return None
    few = (
        f"only {most} of {requests} requests are in flight at a time, because this process may open"
        f" only {allowed()} files"
    )
    return (
        f"{few}: set `ulimit -n {requests + RESERVED}` in the shell that starts the run (or"
        " LimitNOFILE, --ulimit nofile)"
    )


def ran_out(error: OSError) -> bool:
    """True if this process, or the whole machine, has no file descriptor left; the error then says
    nothing about the server."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    if not isinstance(error, socket.gaierror) and not isinstance(error.__cause__, socket.gaierror):
        return False
    try:  # a failed name lookup may have needed a descriptor
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False
