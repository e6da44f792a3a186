"""System calls that a model's program does not need, refused by the kernel (Linux on x86-64 and
arm64).

Sockets, so that there is no network even if no namespace is allowed (`socketpair` of streams stays:
asyncio and multiprocessing need it; a datagram socket could send to any service's). Namespaces and
mounts, in which a program would be its own administrator. Other processes: their limits,
priorities, memory and descriptors. Memory that no limit counts, and objects that outlive their
creator. And calls whose only use here is an attack on the kernel. A refused call raises
PermissionError, so that the program can report it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from areal_x.runtime.guard import LIBC

NEW_NAMESPACE = 0x7E020080  # every CLONE_NEW… of linux/sched.h
# linux/prctl.h
PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS = (
    4,
    21,
    22,
    38,
    39,
)
PR_SET_THP_DISABLE = 41
FILTER = 2  # linux/seccomp.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
FOREIGN = 0x40000000  # from this number on: x86-64's calls with 32-bit pointers
# linux/mman.h; MAP_SHARED_VALIDATE has the bit of MAP_SHARED
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 1, 0x20, 0x40000
F_SETPIPE_SZ = 1031  # linux/fcntl.h
DATAGRAM = 2  # the bit of SOCK_DGRAM and SOCK_RAW, not of SOCK_STREAM and SOCK_SEQPACKET

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
CLONE3 = 435

# on x86_64 and aarch64 (asm/unistd.h), None if there is no such call
Numbers = tuple[int | None, int | None]
REFUSED: Mapping[str, Numbers] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
}
# each makes the kernel hold memory that /proc attributes to no process
UNCOUNTED: Mapping[str, Numbers] = {
    "sendmsg": (46, 211),  # descriptors in flight
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),  # larger buffers
    "splice": (275, 76),
    "tee": (276, 77),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}


class ArgumentTest(NamedTuple):
    """A test of one word of an argument. argument: its index. operation: EQUAL or HAS_BITS. holds:
    False to negate. high: test the upper word."""

    argument: int
    operation: int
    value: int
    holds: bool = True
    high: bool = False


class Rule(NamedTuple):
    """Refuses a call if all tests hold."""

    numbers: Numbers
    tests: Sequence[ArgumentTest]


def _on_other_processes(numbers: Numbers, index: int = 0) -> Rule:
    """Refuses the call for a process other than the caller, which is 0."""
    return Rule(numbers, [ArgumentTest(index, EQUAL, 0, holds=False)])


PARTLY_REFUSED: Sequence[Rule] = (
    Rule((56, 220), [ArgumentTest(0, HAS_BITS, NEW_NAMESPACE)]),  # clone
    Rule((53, 199), [ArgumentTest(0, EQUAL, socket.AF_UNIX, holds=False)]),  # socketpair
    Rule((53, 199), [ArgumentTest(1, HAS_BITS, DATAGRAM)]),
    Rule((44, 206), [ArgumentTest(4, EQUAL, 0, holds=False)]),  # sendto an address
    Rule((44, 206), [ArgumentTest(4, EQUAL, 0, holds=False, high=True)]),
    _on_other_processes((302, 261)),  # prlimit64
    _on_other_processes((203, 122)),  # sched_setaffinity
    _on_other_processes((142, 118)),  # sched_setparam
    _on_other_processes((144, 119)),  # sched_setscheduler
    _on_other_processes((314, 274)),  # sched_setattr
    _on_other_processes((141, 140)),  # setpriority, whose first argument is 0 for a process
    _on_other_processes((141, 140), 1),
    # ioprio_set, whose first argument is 1 for a process
    Rule((251, 30), [ArgumentTest(0, EQUAL, 1, holds=False)]),
    _on_other_processes((251, 30), 1),
    # prctl: /proc would hide the process's memory
    Rule((157, 167), [ArgumentTest(0, EQUAL, PR_SET_DUMPABLE)]),
    Rule((157, 167), [ArgumentTest(0, EQUAL, PR_SET_THP_DISABLE)]),
    Rule((9, 222), [ArgumentTest(3, HAS_BITS, MAP_HUGETLB)]),  # mmap
)
PARTLY_UNCOUNTED: Sequence[Rule] = (
    # Its pages stay when they are partly unmapped, or released with MADV_DONTNEED, and /proc
    # attributes them to no process.
    Rule(
        (9, 222), [ArgumentTest(3, HAS_BITS, MAP_SHARED), ArgumentTest(3, HAS_BITS, MAP_ANONYMOUS)]
    ),
    Rule((72, 25), [ArgumentTest(1, EQUAL, F_SETPIPE_SZ)]),  # fcntl
)


def install_filter(kernel_counts_memory: bool) -> bool:
    """Filters the calls of this process and all that it starts, for good; returns True if the
    filter is active. Afterwards no program gains privileges by being executed.
    kernel_counts_memory: a control group limits memory, so calls that hide it may stay."""
    machine = platform.machine()
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if machine not in ARCHITECTURES:
        return False
    code = instructions(machine, kernel_counts_memory)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))  # struct sock_fprog
    return LIBC.prctl(PR_SET_SECCOMP, FILTER, program, 0, 0) == 0 and _in_force()


def _in_force() -> bool:
    """Checks by the kernel's own status and by a refused call: an enclosing filter, such as a
    container's, may have dropped this one."""
    if (
        LIBC.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) != FILTER
        or LIBC.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1
    ):
        return False
    opened = LIBC.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0)
    if opened >= 0:
        os.close(opened)
    return opened < 0 and ctypes.get_errno() == errno.EPERM


def instructions(machine: str, kernel_counts_memory: bool) -> bytes:
    """Returns the filter as BPF, 8 bytes an instruction."""
    which = list(ARCHITECTURES).index(machine)
    code = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(EQUAL, ARCHITECTURES[machine], 1, 0),
        _refuse(errno.EPERM),
        _instruction(LOAD, NUMBER),
        _instruction(AT_LEAST, FOREIGN, 0, 1),
        _refuse(errno.EPERM),
        # Its flags are behind a pointer, which a filter cannot follow; the C library then uses
        # `clone`.
        _instruction(EQUAL, CLONE3, 0, 1),
        _refuse(errno.ENOSYS),
    ]
    rules = [*(Rule(numbers, ()) for numbers in REFUSED.values()), *PARTLY_REFUSED]
    if not kernel_counts_memory:
        rules += [*(Rule(numbers, ()) for numbers in UNCOUNTED.values()), *PARTLY_UNCOUNTED]
    for numbers, tests in rules:
        if (number := numbers[which]) is not None:
            code += _rule(number, tests)
    return b"".join([*code, _instruction(RETURN, ALLOW)])


def _rule(number: int, tests: Sequence[ArgumentTest]) -> list[bytes]:
    """Expects the call's number to be loaded, and leaves it loaded."""
    if not tests:
        return [_instruction(EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    body = []
    for place, test in enumerate(tests):
        otherwise = 2 * (len(tests) - place - 1) + 1  # behind the refusal
        body.append(_instruction(LOAD, ARGUMENTS + 8 * test.argument + 4 * test.high))
        body.append(
            _instruction(
                test.operation, test.value, *((0, otherwise) if test.holds else (otherwise, 0))
            )
        )
    body += [_refuse(errno.EPERM), _instruction(LOAD, NUMBER)]
    return [_instruction(EQUAL, number, 0, len(body)), *body]


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """if_true, if_false: number of instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _instruction(RETURN, REFUSE | error)
