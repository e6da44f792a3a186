"""A program's view of the machine: a file system of its own with the interpreter, read-only, and
one writable folder.

Built from Linux's namespaces, in two steps. `prepare`, once: mounts what programs may read below a
folder. `enter`, for each program: mounts a file system in memory as its folder, limited in size and
number of files, and makes the prepared folder the root, from which nothing leads out. There is no
/proc, no /etc except the loader's cache, no home, no repository, no socket of the machine's
services; and since the program's process is the first of its own process namespace, no other
process either.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal_x.runtime.guard import CLONE_NEWNET, LIBC, enter_own_namespace

FOLDER = "/home/program"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
)
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = (
    2,
    4,
    32,
    1,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD = 442, 0x8000, -100
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPABILITIES_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
# provides shared memory, which /proc attributes to no process when nothing maps it
ZERO = "/dev/zero"


def readable(packages: Sequence[str]) -> list[str]:
    """Returns the paths that a program may read: the system's programs and libraries, the
    interpreter, its packages."""
    wanted = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, *packages)
    found = [path for path in SYSTEM if Path(path).exists()]
    for path in (*wanted, *(str(Path(folder).resolve()) for folder in wanted)):
        if (
            path != "/"
            and Path(path).exists()
            and not any(Path(path).is_relative_to(known) for known in found)
        ):
            found.append(path)
    return found


def prepare(base: str, own_users: bool, visible: Sequence[str], devices: Sequence[str]) -> None:
    """Moves this process to namespaces of its own, without a network, and mounts below `base` what
    programs may read: `visible`, and `devices`, which can be written to but not changed.

    own_users: use a user namespace, which needs no privilege; otherwise root is needed. Raises:
    OSError if that is not allowed.
    """
    spaces = CLONE_NEWNS | CLONE_NEWNET
    if own_users:
        enter_own_namespace(spaces)
    else:
        _unshare(spaces)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)  # so that no mount is visible outside
    _mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in visible:
        place = Path(base + path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_symlink():
            place.symlink_to(os.readlink(path))  # noqa: PTH115 (as it is written)
        else:
            _bind(path, place, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for path in devices:
        Path(base, "dev").mkdir(exist_ok=True)
        # otherwise its owner could change its mode for the whole machine
        _bind(path, Path(base + path), MS_RDONLY | MS_NOSUID)
    Path(base + FOLDER).mkdir(parents=True, exist_ok=True)
    for link in (Path(base, "tmp"), Path(base, "dev/shm")):
        if not link.exists():  # it exists if the interpreter is in it
            link.symlink_to(FOLDER)
    _mount(None, base, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def enter(base: str, user: int | None, megabytes: float, files: int) -> None:
    """Moves this process, the first of a process namespace, to the file system below `base`, and
    drops its privileges.

    user: the user to become, if root; None in a user namespace. megabytes, files: most that its
    folder may hold. Raises: OSError.
    """
    _unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    _mount(
        "tmpfs",
        base + FOLDER,
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"mode=777,size={int(megabytes * 1e6)},nr_inodes={files + 1}",
    )
    os.chdir(base)
    # the old root is now mounted on top of the new one
    _check(LIBC.syscall(PIVOT_ROOT[platform.machine()], b".", b"."))
    _check(LIBC.umount2(b".", MNT_DETACH))
    os.chdir(FOLDER)
    if user is None:
        _unshare(CLONE_NEWUSER)  # so that its processes are counted separately
    else:
        switch_user(user)
    drop_capabilities()


def used_bytes(first: int) -> int:
    """Returns the bytes of a program's files, which are in memory. first: its first process."""
    root = Path(f"/proc/{first}/root")
    with suppress(OSError):  # not entered yet, or ended
        if Path(f"{root}{FOLDER}").stat().st_dev != root.stat().st_dev:
            held = os.statvfs(f"{root}{FOLDER}")
            return (held.f_blocks - held.f_bfree) * held.f_frsize
    return 0


def new_process_namespace() -> None:
    """Puts what this process starts from now on into a process namespace, whose first process is
    the next one. Raises: OSError."""
    _unshare(CLONE_NEWPID)


def switch_user(user: int) -> None:
    """Needs root. Raises: OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_capabilities() -> None:
    with suppress(AttributeError):
        LIBC.capset(struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24))


def _bind(path: str, place: Path, flags: int) -> None:
    """Bind-mounts `path` at `place`, with everything that is mounted below it."""
    if Path(path).is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(path, str(place), None, MS_BIND | MS_REC)
    # MOUNT_ATTR_… has the same numbers as MS_… here
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    _check(
        LIBC.syscall(
            MOUNT_SETATTR, AT_FDCWD, os.fsencode(place), AT_RECURSIVE, attributes, len(attributes)
        )
    )


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = [
        None if word is None else os.fsencode(word) for word in (source, target, kind, options)
    ]
    _check(LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]))


def _unshare(spaces: int) -> None:
    _check(LIBC.unshare(spaces))


def _check(answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
