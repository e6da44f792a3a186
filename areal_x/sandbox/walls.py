"""What keeps programs in: chosen once by what this machine allows, entered by each program for
good."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from areal_x.runtime import guard, memory_group
from areal_x.sandbox import landlock, view
from areal_x.sandbox.program import SPARE
from areal_x.sandbox.seccomp import PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE, refuse_calls

# namespaces made by the administrator, or by anybody; else a restriction of files
WAYS = ("root", "user", "landlock")
# of programs that the administrator starts: one each, so that none counts for another
FIRST_USER, USERS = 20_000, 40_000
COUNTS_APART = (5, 14)  # of Linux: since then a namespace of users counts its own processes
OPEN_FILES, PENDING_SIGNALS = 256, 1024


@dataclass(frozen=True)
class Walls:
    """way: of `WAYS` the one that this machine allows, or "none". files, network, processes:
    whether programs are kept from those of others. calls: whether the filter of system calls is in
    force. readable: the folders and files that programs may read. groups: where a control group can
    be made for a program's memory; where None, what can be seen of it is counted."""

    way: str
    files: bool
    network: bool
    processes: bool
    calls: bool
    readable: tuple[str, ...]
    groups: memory_group.Place | None = None

    @property
    def namespaces(self) -> bool:
        return self.way in ("root", "user")

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel does, threads too, apart for each program; it counts none of the
        administrator's."""
        return self.way == "root" or (self.way == "user" and _counts_apart() and os.geteuid() != 0)

    @property
    def devices(self) -> tuple[str, ...]:
        """That programs may open; of those that they may write to see `enter`."""
        return (
            (*view.DEVICES, view.ZERO)
            if self.groups is not None or not self.namespaces
            else view.DEVICES
        )


def build(base: str, ways: Sequence[str], readable: Sequence[str], may_group: bool = True) -> Walls:
    """base: an empty folder of the pool's own. ways: of `WAYS` those that may be tried. may_group:
    whether control groups may be."""
    groups = memory_group.find(group_name(base, "trial")) if may_group else None
    calls = guard.allowed(partial(_need_filter, groups is not None))
    walls = Walls("none", False, False, False, calls, tuple(readable), groups)
    for way, own_users in (("root", False), ("user", True)):
        built = replace(walls, way=way, files=True, network=True, processes=True)
        if way in ways and guard.allowed(partial(_try, base, own_users, built)):
            view.prepare(base, own_users, readable, built.devices)
            return built
    guard.leave_network()  # if only for what needs no socket of a file
    known = landlock.version() if "landlock" in ways else 0
    if not known or not guard.allowed(partial(_try_files, base, walls)):
        return replace(walls, network=calls)
    # Without the filter a program reaches services by their sockets, and the limits of others'
    # processes.
    return replace(
        walls,
        way="landlock",
        files=True,
        network=calls,
        processes=calls and known >= landlock.SIGNALS_SINCE,
    )


def group_name(base: str, last: object) -> str:
    """Of a control group that goes with the pool whose folder is `base`."""
    return f"{os.path.basename(base)}.{last}"  # noqa: PTH119


def _try(base: str, own_users: bool, walls: Walls) -> None:
    """All that a program will need, in a process that this may spoil. Raises OSError."""
    view.prepare(base, own_users, walls.readable, walls.devices)
    view.leave_processes()
    if not guard.allowed(partial(view.enter, base, None if own_users else FIRST_USER, 1.0, 10)):
        raise OSError("a view that cannot be entered")


def _try_files(base: str, walls: Walls) -> None:
    """Raises OSError."""
    guard.LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlock.restrict([*walls.readable, *walls.devices], [base, "/dev/null"])


def _need_filter(kernel_counts: bool) -> None:
    if not refuse_calls(kernel_counts):
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
    """In the process of a program, before it runs. keeper: the process above, whose number chooses
    a user. Raises OSError."""
    user = FIRST_USER + keeper % USERS if walls.way == "root" else None
    counted = walls.counts_processes
    if walls.namespaces:
        view.enter(base, user, limits.file_mb, limits.files + 1)  # one is the program itself
    else:
        os.chdir(folder)
        view.drop_capabilities()
    seconds = ceil(limits.cpu_seconds)
    guard.limit(
        {
            resource.RLIMIT_DATA: int(limits.memory_mb * 1e6) + SPARE,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,  # timers too
            resource.RLIMIT_FSIZE: int(limits.file_mb * 1e6),
            resource.RLIMIT_CPU: seconds + 1,
            # one is the first of the namespace
            **({resource.RLIMIT_NPROC: limits.processes + 1} if counted else {}),
        }
    )
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    # SIGXCPU, and SIGKILL at `most` where it is ignored
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, most), most))
    if walls.groups is None:
        # of a large page of which one small is mapped, /proc shows the small
        guard.LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if not refuse_calls(walls.groups is not None) and walls.calls:
        raise OSError("the filter of system calls cannot be installed any more")
    if walls.way == "landlock":
        landlock.restrict([*walls.readable, *walls.devices], [folder, "/dev/null"])
    os.environ.update(HOME=folder, TMPDIR=folder)


def _counts_apart() -> bool:
    numbers = platform.release().split("-")[0].split(".")
    return tuple(int(number) for number in numbers[:2] if number.isdigit()) >= COUNTS_APART
