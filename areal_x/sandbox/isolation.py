"""The isolation of programs: chosen once, by what this machine allows; entered by each program, for
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

# namespaces created by root, or by any user; otherwise restricted access to files
MECHANISMS = ("root", "user", "landlock")
# for programs that root starts: one user each, so that their processes are counted separately
FIRST_USER, USERS = 20_000, 40_000
# the version of Linux since which a user namespace counts its own processes
COUNTED_PER_NAMESPACE_SINCE = (5, 14)
OPEN_FILES, PENDING_SIGNALS = 256, 1024


@dataclass(frozen=True)
class Isolation:
    """mechanism: the one of `MECHANISMS` that this machine allows, or "none". files, network,
    processes: True if programs are isolated from those of others. calls: True if the system call
    filter is active. readable: the files and folders that programs may read. groups: where a
    control group can be created for a program's memory; if None, its visible memory is summed up.
    """

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
        """True if the kernel counts processes, threads included, for each program separately; it
        counts none for root."""
        return self.mechanism == "root" or (
            self.mechanism == "user" and _counts_per_namespace() and os.geteuid() != 0
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that programs may open; `enter` decides which they may write to."""
        return (
            (*namespaces.DEVICES, namespaces.ZERO)
            if self.groups is not None or not self.uses_namespaces
            else namespaces.DEVICES
        )


def choose(
    base: str, mechanisms: Sequence[str], readable: Sequence[str], control_groups: bool = True
) -> Isolation:
    """Returns the strongest isolation that this machine allows, and prepares it.

    base: an empty folder of the pool's own. mechanisms: those of `MECHANISMS` that may be tried.
    control_groups: True if control groups may be used.
    """
    groups = memory_group.find(group_name(base, "trial")) if control_groups else None
    calls = guard.works_in_a_child(partial(_check_filter, groups is not None))
    isolation = Isolation("none", False, False, False, calls, tuple(readable), groups)
    for mechanism, own_users in (("root", False), ("user", True)):
        built = replace(isolation, mechanism=mechanism, files=True, network=True, processes=True)
        if mechanism in mechanisms and guard.works_in_a_child(
            partial(_check_namespaces, base, own_users, built)
        ):
            namespaces.prepare(base, own_users, readable, built.devices)
            return built
    guard.leave_network()  # sockets in the file system stay reachable
    known = landlock.version() if "landlock" in mechanisms else 0
    if not known or not guard.works_in_a_child(partial(_check_landlock, base, isolation)):
        return replace(isolation, network=calls)
    # Without the filter a program can reach services through their sockets, and change the limits
    # of other processes.
    return replace(
        isolation,
        mechanism="landlock",
        files=True,
        network=calls,
        processes=calls and known >= landlock.SIGNALS_SINCE,
    )


def group_name(base: str, last: object) -> str:
    """Returns the name of a control group of the pool whose folder is `base`."""
    return f"{os.path.basename(base)}.{last}"  # noqa: PTH119


def _check_namespaces(base: str, own_users: bool, isolation: Isolation) -> None:
    """Tries everything that a program will need, in a process that this may spoil. Raises: OSError."""
    namespaces.prepare(base, own_users, isolation.readable, isolation.devices)
    namespaces.new_process_namespace()
    if not guard.works_in_a_child(
        partial(namespaces.enter, base, None if own_users else FIRST_USER, 1.0, 10)
    ):
        raise OSError("the namespaces cannot be entered")


def _check_landlock(base: str, isolation: Isolation) -> None:
    """Raises: OSError if Landlock cannot be used."""
    guard.LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlock.restrict([*isolation.readable, *isolation.devices], [base, "/dev/null"])


def _check_filter(kernel_counts_memory: bool) -> None:
    if not install_filter(kernel_counts_memory):
        raise OSError("the system call filter cannot be installed")


@dataclass(frozen=True)
class KernelLimits:
    """The limits that the kernel enforces on a program; as in areal_x.sandbox.pool.SandboxLimits."""

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
    """Isolates this process, a program's, before the program runs. supervisor: the process above,
    whose id selects a user. Raises: OSError."""
    user = FIRST_USER + supervisor % USERS if isolation.mechanism == "root" else None
    counted = isolation.counts_processes
    if isolation.uses_namespaces:
        namespaces.enter(
            base, user, limits.file_mb, limits.files + 1
        )  # one file is the program itself
    else:
        os.chdir(folder)
        namespaces.drop_capabilities()
    seconds = ceil(limits.cpu_seconds)
    guard.set_limits(
        {
            resource.RLIMIT_DATA: int(limits.memory_mb * 1e6) + SPARE,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,  # timers too
            resource.RLIMIT_FSIZE: int(limits.file_mb * 1e6),
            resource.RLIMIT_CPU: seconds + 1,
            # one is init
            **({resource.RLIMIT_NPROC: limits.processes + 1} if counted else {}),
        }
    )
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    # SIGXCPU, and SIGKILL at `most` if that is ignored
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, most), most))
    if isolation.groups is None:
        # if one small page of a large one is mapped, /proc counts only the small one
        guard.LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if not install_filter(isolation.groups is not None) and isolation.calls:
        raise OSError("the system call filter can no longer be installed")
    if isolation.mechanism == "landlock":
        landlock.restrict([*isolation.readable, *isolation.devices], [folder, "/dev/null"])
    os.environ.update(HOME=folder, TMPDIR=folder)


def _counts_per_namespace() -> bool:
    numbers = platform.release().split("-")[0].split(".")
    return (
        tuple(int(number) for number in numbers[:2] if number.isdigit())
        >= COUNTED_PER_NAMESPACE_SINCE
    )
