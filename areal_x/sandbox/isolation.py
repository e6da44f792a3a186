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
from areal_x.sandbox import landlock, namespaces
from areal_x.sandbox.program import SPARE
from areal_x.sandbox.seccomp import PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE, install_filter

# namespaces made by the administrator, or by anybody; else a restriction of files
MECHANISMS = ("root", "user", "landlock")
# of programs that the administrator starts: one each, so that none counts for another
FIRST_USER, USERS = 20_000, 40_000
COUNTED_PER_NAMESPACE_SINCE = (
    5,
    14,
)  # of Linux: since then a namespace of users counts its own processes
OPEN_FILES, PENDING_SIGNALS = 256, 1024


@dataclass(frozen=True)
class Isolation:
    """way: of `WAYS` the one that this machine allows, or "none". files, network, processes:
    whether programs are kept from those of others. calls: whether the filter of system calls is in
    force. readable: the folders and files that programs may read. groups: where a control group can
    be made for a program's memory; where None, what can be seen of it is counted."""

    mechanism: str
    files: bool
    network: bool
    processes: bool
    calls: bool
    readable: tuple[str, ...]
    groups: memory_group.Place | None = None

    @property
    def uses_namespaces(self) -> bool:
        return self.mechanism in ("root", "user")

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel does, threads too, apart for each program; it counts none of the
        administrator's."""
        return self.mechanism == "root" or (
            self.mechanism == "user" and _counts_per_namespace() and os.geteuid() != 0
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """That programs may open; of those that they may write to see `enter`."""
        return (
            (*namespaces.DEVICES, namespaces.ZERO)
            if self.groups is not None or not self.uses_namespaces
            else namespaces.DEVICES
        )


def choose(
    base: str, mechanisms: Sequence[str], readable: Sequence[str], control_groups: bool = True
) -> Isolation:
    """base: an empty folder of the pool's own. ways: of `WAYS` those that may be tried. may_group:
    whether control groups may be."""
    groups = memory_group.find(group_name(base, "trial")) if control_groups else None
    calls = guard.allowed(partial(_check_filter, groups is not None))
    isolation = Isolation("none", False, False, False, calls, tuple(readable), groups)
    for mechanism, own_users in (("root", False), ("user", True)):
        built = replace(isolation, mechanism=mechanism, files=True, network=True, processes=True)
        if mechanism in mechanisms and guard.allowed(
            partial(_check_namespaces, base, own_users, built)
        ):
            namespaces.prepare(base, own_users, readable, built.devices)
            return built
    guard.leave_network()  # if only for what needs no socket of a file
    known = landlock.version() if "landlock" in mechanisms else 0
    if not known or not guard.allowed(partial(_check_landlock, base, isolation)):
        return replace(isolation, network=calls)
    # Without the filter a program reaches services by their sockets, and the limits of others'
    # processes.
    return replace(
        isolation,
        mechanism="landlock",
        files=True,
        network=calls,
        processes=calls and known >= landlock.SIGNALS_SINCE,
    )


def group_name(base: str, last: object) -> str:
    """Of a control group that goes with the pool whose folder is `base`."""
    return f"{os.path.basename(base)}.{last}"  # noqa: PTH119


def _check_namespaces(base: str, own_users: bool, isolation: Isolation) -> None:
    """All that a program will need, in a process that this may spoil. Raises OSError."""
    namespaces.prepare(base, own_users, isolation.readable, isolation.devices)
    namespaces.new_process_namespace()
    if not guard.allowed(
        partial(namespaces.enter, base, None if own_users else FIRST_USER, 1.0, 10)
    ):
        raise OSError("a view that cannot be entered")


def _check_landlock(base: str, isolation: Isolation) -> None:
    """Raises OSError."""
    guard.LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlock.restrict([*isolation.readable, *isolation.devices], [base, "/dev/null"])


def _check_filter(kernel_counts_memory: bool) -> None:
    if not install_filter(kernel_counts_memory):
        raise OSError("no filter of system calls")


@dataclass(frozen=True)
class KernelLimits:
    """What the kernel keeps a program to; as in areal_x.sandbox.pool.SandboxLimits."""

    cpu_seconds: float
    memory_mb: float
    processes: int
    file_mb: float
    files: int


def program_folder(isolation: Isolation, base: str) -> str:
    return namespaces.FOLDER if isolation.uses_namespaces else tempfile.mkdtemp(dir=base)


def enter(
    isolation: Isolation, base: str, folder: str, supervisor: int, limits: KernelLimits
) -> None:
    """In the process of a program, before it runs. keeper: the process above, whose number chooses
    a user. Raises OSError."""
    user = FIRST_USER + supervisor % USERS if isolation.mechanism == "root" else None
    counted = isolation.counts_processes
    if isolation.uses_namespaces:
        namespaces.enter(base, user, limits.file_mb, limits.files + 1)  # one is the program itself
    else:
        os.chdir(folder)
        namespaces.drop_capabilities()
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
    if isolation.groups is None:
        # of a large page of which one small is mapped, /proc shows the small
        guard.LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if not install_filter(isolation.groups is not None) and isolation.calls:
        raise OSError("the filter of system calls cannot be installed any more")
    if isolation.mechanism == "landlock":
        landlock.restrict([*isolation.readable, *isolation.devices], [folder, "/dev/null"])
    os.environ.update(HOME=folder, TMPDIR=folder)


def _counts_per_namespace() -> bool:
    numbers = platform.release().split("-")[0].split(".")
    return (
        tuple(int(number) for number in numbers[:2] if number.isdigit())
        >= COUNTED_PER_NAMESPACE_SINCE
    )
