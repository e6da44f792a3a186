"""Restricts the files that a process may access, by Linux's Landlock: for machines that allow no
namespaces.

Weaker than namespaces (areal_x.sandbox.namespaces): names, sizes and owners of all files stay
visible, only their contents do not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from areal_x.runtime.guard import LIBC

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
VERSION, PATH_BENEATH = 1, 1
SIGNALS_SINCE = 6  # the Landlock version since which signals to other processes can be refused
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
# rights on files, by the version that introduced them
RIGHTS_SINCE = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
# the rights that apply to files other than folders
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
SCOPES = 0b11  # abstract sockets and signals


def version() -> int:
    """Returns the kernel's Landlock version; 0 if it has none."""
    found = LIBC.syscall(CREATE_RULESET, None, 0, VERSION)
    return max(0, int(found))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restricts this process and all that it starts, for good: files beneath `readable` can be read
    and executed, those beneath `writable` also changed, all others neither. PR_SET_NO_NEW_PRIVS
    must be set before. Raises: OSError."""
    known = version()
    rights = next(
        RIGHTS_SINCE[least] for least in sorted(RIGHTS_SINCE, reverse=True) if known >= least
    )
    scopes = SCOPES if known >= SIGNALS_SINCE else 0
    attributes = struct.pack("=QQQ", rights, 0, scopes)[: 24 if scopes else 8]
    ruleset = LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise OSError("Landlock creates no ruleset")
    for paths, granted in ((readable, EXECUTE | READ_FILE | READ_DIR), (writable, rights)):
        for path in paths:
            with suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                allowed = granted & rights
                if not os.path.isdir(path):  # noqa: PTH112
                    allowed &= FILE_RIGHTS
                status = LIBC.syscall(
                    ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", allowed, place), 0
                )
                os.close(place)
                if status != 0:
                    raise OSError(f"Landlock refuses the rule for {path}")
    if LIBC.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError("Landlock does not restrict this process")
    os.close(ruleset)
