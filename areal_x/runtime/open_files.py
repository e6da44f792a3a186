"""How many files, and so connections, this process may have open at a time (`ulimit -n`)."""

from __future__ import annotations

import errno
import os
import socket
import sys
from contextlib import suppress

# for everything but requests to servers: logs, checkpoints, the journal, pipes, agents' connections
RESERVED = 256
MOST = 2**20  # where the system sets no bound


def raise_limit() -> None:
    """Raises this process's soft limit to the hard one, as a shell's 1,024 is meant for programs of
    another kind. For commands: the limit is the whole process's, and its children inherit it."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the kernel's own bound may be lower (macOS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allowed() -> int:
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def connections() -> int:
    """Most requests to servers that may be in flight at a time."""
    return max(1, allowed() - min(RESERVED, allowed() // 2))


def enough_for(requests: int) -> str | None:
    """What to set where fewer requests than these can be in flight, or None."""
    most = connections()
    if most >= requests:
        return None
    few = (
        f"only {most} of {requests} requests are in flight at a time, as this process may open"
        f" {allowed()} files"
    )
    return (
        f"{few}: set `ulimit -n {requests + RESERVED}` in the shell that starts the run (or"
        " LimitNOFILE, --ulimit nofile)"
    )


def ran_out(error: OSError) -> bool:
    """True if this process, or the whole machine, has no descriptor left; nothing is known then
    about the other side."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    if not isinstance(error, socket.gaierror) and not isinstance(error.__cause__, socket.gaierror):
        return False
    try:  # a name could not be looked up, perhaps for want of a descriptor
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False
