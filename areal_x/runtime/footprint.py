"""How much memory processes hold, as far as /proc shows it: for machines where no control group
limits it (Linux)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# in kilobytes, of a process's status
HELD = ("RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:", "VmPTE:")
# of its smaps_rollup, the same but for the last two
SHARED_ONCE = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
OF_THE_KERNEL = ("HugetlbPages:", "VmPTE:")
THREAD_BYTES = 32 << 10  # a thread's stack in the kernel and what describes it
PIPE_BYTES = 64 << 10  # the most that an ordinary one holds
MAPPING_BYTES = 300  # what describes one
# kilobytes of address space from which on mappings are counted: fewer cannot be many
MAPPINGS_FROM = 1 << 18
SHARED_MEMORY = "/dev/zero (deleted)"  # what maps calls that which no file backs
# net.core.wmem_default of Linux, the most that one holds unless it asks for more
SOCKET_BYTES = 212_992


def memory(pids: Sequence[int], most: float) -> int:
    """Bytes that no file backs, and the kernel's own for these processes, of all together.

    What several share is counted once where the sum is beyond `most`, which takes the kernel
    longer.
    """
    kernels = sum(_kernels(pid) for pid in pids) + _buffers(pids)
    held = sum(_kilobytes(pid, "status", HELD) for pid in pids) * 1024
    if held + kernels > most:
        held = sum(_shared_once(pid) for pid in pids) * 1024
    return held + kernels


def threads(pids: Sequence[int]) -> int:
    return sum(_threads(pid) for pid in pids)


def deleted(pids: Sequence[int], unknown: float) -> int:
    """Bytes of files that have no name any more, only these processes. unknown: what one counts as
    that is only mapped."""
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
    """Kilobytes. A process may keep others from looking so closely; then as if it shared
    nothing."""
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
    """Bytes of the kernel's that describe a process; but for page tables, which are counted with
    what it holds."""
    mappings = 0
    if _kilobytes(pid, "status", ("VmSize:",)) > MAPPINGS_FROM:
        with suppress(OSError):
            mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    return _threads(pid) * THREAD_BYTES + mappings * MAPPING_BYTES


def _buffers(pids: Sequence[int]) -> int:
    """The most that their pipes and sockets can hold."""
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
