"""System calls that a program of a model has no use for, refused by the kernel (Linux on x86-64 and arm64).

Sockets, so that there is no network even where no namespace is allowed (`socketpair` stays: asyncio and multiprocessing need
it). Namespaces and mounts, in which a program would be its own administrator. Memory that no limit counts. And calls whose only
use here is an attack on the kernel. Refused means PermissionError, so that the program can read what happened.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from areal_x.guard import LIBC

NEW_NAMESPACE = 0x7E020080  # every CLONE_NEW… of linux/sched.h
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
FOREIGN = 0x40000000  # from here on: x86-64's calls for 32-bit pointers

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
REFUSED = {  # from asm/unistd.h
    "socket": {"x86_64": 41, "aarch64": 198},
    "shmget": {"x86_64": 29, "aarch64": 194},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "memfd_secret": {"x86_64": 447, "aarch64": 447},
    "unshare": {"x86_64": 272, "aarch64": 97},
    "setns": {"x86_64": 308, "aarch64": 268},
    "mount": {"x86_64": 165, "aarch64": 40},
    "umount2": {"x86_64": 166, "aarch64": 39},
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "open_tree": {"x86_64": 428, "aarch64": 428},
    "move_mount": {"x86_64": 429, "aarch64": 429},
    "fsopen": {"x86_64": 430, "aarch64": 430},
    "mount_setattr": {"x86_64": 442, "aarch64": 442},
    "ptrace": {"x86_64": 101, "aarch64": 117},
    "process_vm_writev": {"x86_64": 311, "aarch64": 271},
    "bpf": {"x86_64": 321, "aarch64": 280},
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
    "userfaultfd": {"x86_64": 323, "aarch64": 282},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    "add_key": {"x86_64": 248, "aarch64": 217},
    "request_key": {"x86_64": 249, "aarch64": 218},
    "keyctl": {"x86_64": 250, "aarch64": 219},
    "open_by_handle_at": {"x86_64": 304, "aarch64": 265},
}


def refuse_calls() -> bool:
    """For this process and all that it starts, for good; whether this machine can. After it no program gains rights by being
    executed."""
    machine = platform.machine()
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if machine not in ARCHITECTURES:
        return False
    code = instructions(machine)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))  # struct sock_fprog
    return bool(LIBC.prctl(PR_SET_SECCOMP, FILTER, program, 0, 0) == 0)


def instructions(machine: str) -> bytes:
    """The filter as BPF: 8 bytes an instruction."""
    code = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, ARCHITECTURES[machine], 1, 0),
        _refuse(errno.EPERM),
        _step(LOAD, NUMBER),
        _step(AT_LEAST, FOREIGN, 0, 1),
        _refuse(errno.EPERM),
        # Its flags are behind a pointer that a filter cannot follow; the C library then uses `clone`.
        _step(EQUAL, CLONE3, 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for numbers in REFUSED.values():
        code += [_step(EQUAL, numbers[machine], 0, 1), _refuse(errno.EPERM)]
    code += [
        _step(EQUAL, CLONE[machine], 0, 3),
        _step(LOAD, FIRST_ARGUMENT),
        _step(HAS_BITS, NEW_NAMESPACE, 0, 1),
        _refuse(errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    return b"".join(code)


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """if_true, if_false: how many instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _step(RETURN, REFUSE | error)
