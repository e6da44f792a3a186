"""Memory use of processes, as far as /proc shows it, for machines where no control group limits it
(Linux)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Lines of /proc/PID/status, in kilobytes.
HELD = ("RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:", "VmPTE:")
# Lines of /proc/PID/smaps_rollup: the same, shared pages divided among their processes, without the
# last two.
SHARED_ONCE = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
OF_THE_KERNEL = ("HugetlbPages:", "VmPTE:")
THREAD_BYTES = 32 << 10  # a thread's kernel stack and its data structures
PIPE_BYTES = 64 << 10  # capacity of a default pipe
MAPPING_BYTES = 300  # kernel memory of one mapping
# Kilobytes of address space above which mappings are counted: smaller ones cannot have many.
MAPPINGS_FROM = 1 << 18
SHARED_MEMORY = "/dev/zero (deleted)"  # the name in maps of memory without a file
# net.core.wmem_default of Linux: the capacity of a socket that does not ask for more.
SOCKET_BYTES = 212_992


def memory_bytes(pids: Sequence[int], most: float) -> int:
    """Returns the bytes that no file backs, plus the kernel's own memory, of these processes
    together.

    Shared memory is counted once if the plain sum exceeds `most`; that takes the kernel longer.
    """
    kernels = sum(_kernels(pid) for pid in pids) + _buffers(pids)
    held = sum(_kilobytes(pid, "status", HELD) for pid in pids) * 1024
    if held + kernels > most:
        held = sum(_shared_once(pid) for pid in pids) * 1024
    return held + kernels


def thread_count(pids: Sequence[int]) -> int:
    """Returns the number of threads of these processes."""
    return sum(_threads(pid) for pid in pids)


def deleted_file_bytes(pids: Sequence[int], unknown: float) -> int:
    """Returns the bytes of deleted files that these processes still have open or mapped. unknown: the
    size to assume for a file that is only mapped."""
    found: dict[tuple[int, int], float] = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, _, _, device, inode, *name = line.split(maxsplit=5)
                if name and name[0].endswith(" (deleted)") and name[0] != SHARED_MEMORY:
                    major, minor = (int(number, 16) for number in device.split(":"))
                    found[os.makedev(major, minor), int(inode)] = unknown
    for pid in pids:
        for path in _descriptors(pid):
            with suppress(OSError):
                about = os.stat(path)  # noqa: PTH116
                if about.st_nlink == 0:
                    found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return int(sum(found.values()))


def _shared_once(pid: int) -> int:
    """Returns the kilobytes of a process with shared pages divided among their processes. If the
    process denies that view, its pages count as unshared."""
    shared = _kilobytes(pid, "smaps_rollup", SHARED_ONCE)
    return (
        shared + _kilobytes(pid, "status", OF_THE_KERNEL)
        if shared
        else _kilobytes(pid, "status", HELD)
    )


def _kilobytes(pid: int, name: str, lines: tuple[str, ...]) -> int:
    with suppress(OSError):  # it has ended
        words = [
            line.split()
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines()
            if line.startswith(lines)
        ]
        return sum(int(number) for _, number, *_ in words)
    return 0


def _threads(pid: int) -> int:
    return _kilobytes(pid, "status", ("Threads:",))


def _kernels(pid: int) -> int:
    """Returns the kernel memory of a process without its page tables, which HELD includes."""
    mappings = 0
    if _kilobytes(pid, "status", ("VmSize:",)) > MAPPINGS_FROM:
        with suppress(OSError):
            mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    return _threads(pid) * THREAD_BYTES + mappings * MAPPING_BYTES


def _buffers(pids: Sequence[int]) -> int:
    """Returns the capacity of the processes' pipes and sockets, in bytes."""
    found: set[str] = set()
    for pid in pids:
        for path in _descriptors(pid):
            with suppress(OSError):
                found.add(os.readlink(path))  # noqa: PTH115
    pipes = sum(name.startswith("pipe:") for name in found)
    sockets = sum(name.startswith("socket:") for name in found)
    return pipes * PIPE_BYTES + sockets * SOCKET_BYTES


def _descriptors(pid: int) -> list[str]:
    with suppress(OSError):
        return [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208
    return []
