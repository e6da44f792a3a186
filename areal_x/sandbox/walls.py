"""What keeps programs in: chosen once by what this machine allows, entered by each program for good."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from areal_x import guard
from areal_x.sandbox import landlock, view
from areal_x.sandbox.program import SPARE
from areal_x.sandbox.seccomp import refuse_calls

WAYS = ("root", "user", "landlock")  # namespaces made by the administrator, or by anybody; else a restriction of files
FIRST_USER, USERS = 20_000, 40_000  # of programs that the administrator starts: one each, so that none counts for another
COUNTS_APART = (5, 14)  # of Linux: since then a namespace of users counts its own processes
OPEN_FILES = 256


@dataclass(frozen=True)
class Walls:
    """way: of `WAYS` the one that this machine allows, or "none". files, network, processes: whether programs are kept from
    those of others. readable: the folders and files that programs may read."""

    way: str
    files: bool
    network: bool
    processes: bool
    readable: tuple[str, ...]

    @property
    def namespaces(self) -> bool:
        return self.way in ("root", "user")


def build(base: str, ways: Sequence[str], readable: Sequence[str]) -> Walls:
    """base: an empty folder of the pool's own. ways: of `WAYS` those that may be tried."""
    seen = tuple(readable)
    for way, own_users in (("root", False), ("user", True)):
        if way in ways and guard.allowed(partial(_try, base, own_users, seen)):
            view.prepare(base, own_users, seen)
            return Walls(way, True, True, True, seen)
    offline = guard.leave_network() or guard.allowed(_need_filter)
    known = landlock.version() if "landlock" in ways else 0
    return Walls("landlock" if known else "none", known > 0, offline, known >= landlock.SIGNALS_SINCE, seen)


def _try(base: str, own_users: bool, readable: Sequence[str]) -> None:
    """All that a program will need, in a process that this may spoil. Raises OSError."""
    view.prepare(base, own_users, readable)
    view.leave_processes()
    if not guard.allowed(partial(view.enter, base, None if own_users else FIRST_USER, 1.0, 10)):
        raise OSError("a view that cannot be entered")


def _need_filter() -> None:
    if not refuse_calls():
        raise OSError("no filter of system calls")


@dataclass(frozen=True)
class Limits:
    """What the kernel keeps a program to; as in areal_x.sandbox.pool.SandboxLimits."""

    cpu_seconds: float
    memory_mb: float
    processes: int
    file_mb: float
    files: int


def folder_for(walls: Walls, base: str) -> str:
    return view.FOLDER if walls.namespaces else tempfile.mkdtemp(dir=base)


def enter(walls: Walls, base: str, folder: str, keeper: int, limits: Limits) -> None:
    """In the process of a program, before it runs. keeper: the process above, whose number chooses a user. Raises OSError."""
    user = FIRST_USER + keeper % USERS if walls.way == "root" else None
    if walls.namespaces:
        view.enter(base, user, limits.file_mb, limits.files + 1)  # one is the program itself
    else:
        os.chdir(folder)
        view.drop_capabilities()
    seconds = ceil(limits.cpu_seconds)
    apart = walls.way == "root" or (walls.way == "user" and _counts_apart())
    guard.limit(
        {
            resource.RLIMIT_DATA: int(limits.memory_mb * 1e6) + SPARE,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_FSIZE: int(limits.file_mb * 1e6),
            resource.RLIMIT_CPU: seconds + 1,
            **({resource.RLIMIT_NPROC: limits.processes + 1} if apart else {}),  # one is the first of the namespace
        }
    )
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, most), most))  # SIGXCPU, and SIGKILL at `most` where it is ignored
    refuse_calls()
    if walls.way == "landlock":
        landlock.restrict([*walls.readable, *view.DEVICES], [folder, "/dev/null"])
    os.environ.update(HOME=folder, TMPDIR=folder)


def _counts_apart() -> bool:
    numbers = platform.release().split("-")[0].split(".")
    return tuple(int(number) for number in numbers[:2] if number.isdigit()) >= COUNTS_APART
