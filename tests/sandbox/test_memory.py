"""A program holds no more memory than it may, wherever it hides it: with a control group, and without.

Each attack would hold 150 MB where 64 are allowed, and then goes on for ever: what ends it is the limit, or a call that is
refused.
"""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap

import pytest

from areal_x.runtime import memory_group
from areal_x.sandbox.pool import Sandbox, SandboxLimits
from tests.thorough import further

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LIMITS = SandboxLimits(seconds=15, cpu_seconds=15, memory_mb=64, processes=24, file_mb=200)
PIECE = 5_000_000
BEGIN = """
import array, ctypes, fcntl, mmap, os, socket, sys, time
BYTES, PIECE = 150_000_000, 5_000_000
libc, kept = ctypes.CDLL(None, use_errno=True), []

def checked(answer):
    if answer == -1:
        raise PermissionError(ctypes.get_errno(), "refused")
    return answer

def filled(writing):
    os.set_blocking(writing, False)
    try:
        while True: os.write(writing, bytes(4096))
    except BlockingIOError:
        pass

def together(work, processes):
    for _ in range(processes - 1):
        if os.fork() == 0:
            try: work()
            except BaseException: os._exit(1)
            time.sleep(1000)
    work()
"""
ATTACKS = {
    "shared pages that are given back": """
        for _ in range(BYTES // PIECE):
            m = mmap.mmap(-1, PIECE)
            m.write(bytes(PIECE))
            m.madvise(mmap.MADV_DONTNEED)
            kept.append(m)
        """,
    "shared pages of a device": """
        for _ in range(BYTES // PIECE):
            device = os.open("/dev/zero", os.O_RDWR)
            m = mmap.mmap(device, PIECE)
            m.write(bytes(PIECE))
            m.madvise(mmap.MADV_DONTNEED)
            kept.append(m)
        """,
    "files that only a descriptor names": """
        kept = os.memfd_create("x")
        for _ in range(BYTES // PIECE): os.write(kept, bytes(PIECE))
        """,
    "files in memory": """
        with open("x", "wb") as file:
            for _ in range(BYTES // PIECE): file.write(bytes(PIECE))
        """,
    "sockets that are in flight": """
        near, far = socket.socketpair()
        near.sendmsg([b"x"])
        for _ in range(100):
            a, b = socket.socketpair()
            a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
            filled(a.fileno())
            near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno(), b.fileno()]))])
        """,
    "buffers of sockets": """
        def work():
            for _ in range(100):
                a, b = socket.socketpair()
                filled(a.fileno())
                filled(b.fileno())
                kept.extend([a, b])
        together(work, 8)
        """,
    "large buffers of sockets": """
        for _ in range(100):
            a, b = socket.socketpair()
            a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            filled(a.fileno())
            kept.extend([a, b])
        """,
    "page tables": """
        m = mmap.mmap(-1, 160 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
        for place in range(0, len(m), 1 << 21): m[place]
        """,
    "queues of System V": """
        while True:
            queue = checked(libc.msgget(0, 0o1600))
            while libc.msgsnd(queue, ctypes.c_long(1).value.to_bytes(8, "little") + bytes(8000), 8000, 0o4000) == 0: pass
        """,
    "pages in pipes": """
        reading, writing = os.pipe()
        class Piece(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        m = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE)
        m.write(bytes(1 << 16))
        piece = Piece(ctypes.addressof(ctypes.c_char.from_buffer(m)), 1 << 16)
        checked(libc.vmsplice(writing, ctypes.byref(piece), 1, 0))
        """,
    "pages of a process that cannot be looked into": """
        def work():
            libc.prctl(4, 0, 0, 0, 0)
            kept.append(b"1" * 30_000_000)
        together(work, 5)
        """,
}


@pytest.fixture(params=["user", *further("root", "landlock")])
def mechanism(request):
    return request.param


@pytest.fixture(params=["group", "counted"])
def groups(request):
    if request.param == "group" and memory_group.find(f"areal_x_test.{os.getpid()}") is None:
        pytest.skip("this run may make no control group")
    return request.param == "group"


def results(programs, mechanism, groups, limits=LIMITS):
    async def all_of_them():
        sandbox = Sandbox(limits, workers=2, mechanisms=(mechanism,), groups=groups)
        try:
            await sandbox.start()
            if not sandbox._fork_server.confined:
                pytest.skip(f"this machine does not allow {mechanism}")
            return await asyncio.gather(*(sandbox.run(program) for program in programs))
        finally:
            await sandbox.close()

    return asyncio.run(all_of_them())


def attack(name):
    return f"{BEGIN}\n{textwrap.dedent(ATTACKS[name])}\ntime.sleep(1000)"


def test_no_attack_holds_more_memory_than_is_allowed(mechanism, groups):
    on_disk = {"files in memory"} if mechanism == "landlock" else set()
    names = [name for name in ATTACKS if name not in on_disk]
    found = dict(zip(names, results(map(attack, names), mechanism, groups), strict=True))
    assert {name: result for name, result in found.items() if not ended(result)} == {}


def ended(result):
    refused = result.status == "error" and result.error.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))
    return result.status == "memory" or refused
