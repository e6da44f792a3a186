"""System calls that affect others are refused, on both architectures; a missing filter is noticed."""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import os
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x.sandbox import seccomp
from areal_x.sandbox.pool import Sandbox, SandboxLimits
from tests.thorough import further

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LIMITS = SandboxLimits(seconds=20, cpu_seconds=20)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
PARTLY = ("clone", "socketpair", "sendto", "prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler")
PARTLY += ("sched_setattr", "setpriority", "ioprio_set", "prctl", "mmap", "fcntl")
OTHERS = """
import ctypes, errno, os, signal, socket, sys
victim, service, numbers = {victim}, {service!r}, {numbers!r}
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}

def call(name, *arguments):
    ctypes.set_errno(0)
    answer = libc.syscall(numbers[name], *arguments)
    found[name if name not in found else name + " again"] = errno.errorcode[ctypes.get_errno()] if answer == -1 else "done"

low = (ctypes.c_ulong * 2)(1, 1)
for pid in (victim, os.getppid()):
    call("prlimit64", pid, 0, low, None)
    call("sched_setaffinity", pid, 8, ctypes.byref(ctypes.c_ulong(1)))
    call("setpriority", 0, pid, 19)
call("setpriority", 2, 0, 19)
call("ioprio_set", 1, victim, 3 << 13)
call("ioprio_set", 3, 0, 3 << 13)
call("sched_setscheduler", victim, 5, ctypes.byref(ctypes.c_int(0)))
call("sched_setattr", victim, bytes(48), 0)
piece = (ctypes.c_ulong * 2)(ctypes.addressof(low), 8)
call("process_vm_readv", victim, piece, 1, piece, 1, 0)
call("process_vm_writev", victim, piece, 1, piece, 1, 0)
call("ptrace", 16, victim, 0, 0)
call("kcmp", victim, os.getpid(), 0, 0, 0)
call("pidfd_getfd", 0, 0, 0)
call("process_madvise", 0, piece, 1, 20, 0)
call("process_mrelease", 0, 0)
call("migrate_pages", victim, 0, None, None)
call("move_pages", victim, 0, None, None, None, 0)
call("kill", victim, 9)
call("tgkill", victim, victim, 9)
call("kill", -1, 0) if False else None
try:
    call("pidfd_send_signal", os.pidfd_open(victim), 9, None, 0)
except OSError as error:
    found["pidfd_send_signal"] = errno.errorcode[error.errno]
call("msgget", 0, 0o1600)
call("semget", 0, 1, 0o1600)
call("shmget", 0, 4096, 0o1600)
call("mq_open", b"left", 0o102, 0o600, None)
call("keyctl", 0, -3, 0)
call("add_key", b"user", b"x", b"y", 1, -5)
call("io_uring_setup", 1, bytes(120))
call("memfd_create", b"x", 0)
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    try:
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        a.sendto(b"from the program", service)
        found[kind.name] = "done"
    except OSError as error:
        found[kind.name] = errno.errorcode[error.errno]
a, b = socket.socketpair()
try:
    a.sendto(b"x", service)
    found["sendto"] = "done"
except OSError as error:
    found["sendto"] = errno.errorcode[error.errno]
call("connect", a.fileno(), b"", 0)
call("bind", a.fileno(), b"", 0)
# what is a program's own
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.nice(1)
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
child = os.fork()
if child == 0:
    while True: pass
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
a.sendall(b"fine")
assert b.recv(10) == b"fine"
print(found)
"""


@pytest.fixture(params=["user", *further("root", "landlock")])
def mechanism(request):
    return request.param


def run(program, *, mechanism=None, limits=LIMITS, **settings):
    async def one():
        sandbox = Sandbox(limits, workers=1, **settings, **({"mechanisms": (mechanism,)} if mechanism else {}))
        try:
            await sandbox.start()
            if mechanism and not sandbox._fork_server.confined:
                pytest.skip(f"this machine does not allow {mechanism}")
            return await sandbox.run(program)
        finally:
            await sandbox.close()

    return asyncio.run(one())


def calls(machine):
    """Returns the numbers in the kernel's headers, by name."""
    if not HEADERS[machine].is_file():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", HEADERS[machine].read_text(), re.MULTILINE)
    return {name: int(number) for name, number in found}


def test_nothing_can_be_done_to_other_processes_services_or_what_outlives_a_program(mechanism, tmp_path):
    which = list(seccomp.ARCHITECTURES).index(os.uname().machine)
    numbers = {name: both[which] for name, both in {**seccomp.REFUSED, **others()}.items()}
    place = tmp_path / "service"
    place.parent.chmod(0o777)
    with subprocess.Popen(["sleep", "1000"]) as victim, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        try:
            service.bind(str(place))
            place.chmod(0o777)
            before = resource.prlimit(victim.pid, resource.RLIMIT_CPU), os.getpriority(os.PRIO_PROCESS, victim.pid)
            result = run(OTHERS.format(victim=victim.pid, service=str(place), numbers=numbers), mechanism=mechanism)
            assert result.status == "ok", result
            found = ast.literal_eval(result.output)
            assert {name: answer for name, answer in found.items() if answer not in ("EPERM", "ESRCH")} == {}
            assert victim.poll() is None
            assert (resource.prlimit(victim.pid, resource.RLIMIT_CPU), os.getpriority(os.PRIO_PROCESS, victim.pid)) == before
            service.setblocking(False)
            with pytest.raises(BlockingIOError):
                service.recv(100)
        finally:
            victim.kill()


def others():
    """Calls that the filter refuses in part, or leaves to Landlock, and that the test makes."""
    return {
        "prlimit64": (302, 261),
        "sched_setaffinity": (203, 122),
        "setpriority": (141, 140),
        "ioprio_set": (251, 30),
        "sched_setscheduler": (144, 119),
        "sched_setattr": (314, 274),
        "kill": (62, 129),
        "tgkill": (234, 131),
        "pidfd_send_signal": (424, 424),
    }


def test_devices_of_the_machine_cannot_be_changed_by_their_owner(mechanism):
    mode = stat.S_IMODE(Path("/dev/null").stat().st_mode)
    program = (
        "import os\n"
        "try: os.chmod('/dev/null', 0o{:o})\n"
        "except OSError as error: print(error.errno)\n"
        "open('/dev/null', 'w').write('x')"
    )
    if mechanism == "landlock" and os.geteuid() == 0:
        pytest.skip("Landlock knows no right to change modes: nobody but root owns it")
    # The mode that it has: an attack that succeeds should harm no machine.
    result = run(program.format(mode), mechanism=mechanism)
    assert (result.status, result.output) == ("ok", f"{errno.EROFS}\n")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    known, which = calls(machine), list(seccomp.ARCHITECTURES).index(machine)
    for name, numbers in {**seccomp.REFUSED, **seccomp.UNCOUNTED}.items():
        assert numbers[which] == known.get(name), name
    ours = {rule.numbers[which] for rule in (*seccomp.PARTLY_REFUSED, *seccomp.PARTLY_UNCOUNTED)}
    assert ours == {known[name] for name in PARTLY}


def answer(code, machine, number, arguments=()):
    """Evaluates the filter for a call: an interpreter of its few instructions."""
    data = struct.pack("<iIQ6Q", number, seccomp.ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    steps, place, held = [struct.unpack_from("=HBBI", code, 8 * i) for i in range(len(code) // 8)], 0, 0
    while True:
        operation, if_true, if_false, value = steps[place]
        place += 1
        if operation == seccomp.LOAD:
            (held,) = struct.unpack_from("<I", data, value)
        elif operation == seccomp.RETURN:
            return value
        else:
            holds = {seccomp.EQUAL: held == value, seccomp.AT_LEAST: held >= value, seccomp.HAS_BITS: bool(held & value)}
            place += if_true if holds[operation] else if_false


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_nothing_else(machine, counts):
    which = list(seccomp.ARCHITECTURES).index(machine)
    code = seccomp.instructions(machine, counts)
    refused, uncounted = seccomp.REFUSE | errno.EPERM, seccomp.ALLOW if counts else seccomp.REFUSE | errno.EPERM
    of = {name: number for name, number in calls(machine).items() if number < 1000}
    whole = {
        **dict.fromkeys(seccomp.REFUSED, refused),
        **dict.fromkeys(seccomp.UNCOUNTED, uncounted),
        "clone3": 0x50000 | errno.ENOSYS,
    }
    plain = {"socketpair": (1, 1), "mmap": (0, 1, 3, 0x22), "ioprio_set": (1, 0, 0), "clone": (17,)}
    for name, number in of.items():
        if name != "arch_specific_syscall":
            assert answer(code, machine, number, plain.get(name, ())) == whole.get(name, seccomp.ALLOW), name
    others = {
        "clone": [(0x10000000 | 17,)],
        "socketpair": [(1, 2), (1, 3), (1, 2 | 0o2000000), (30, 1), (16, 1)],
        "sendto": [(3, 0, 0, 0, 0x1000), (3, 0, 0, 0, 1 << 40)],
        "prlimit64": [(1,), (0xFFFFFFFF,)],
        "sched_setaffinity": [(7,)],
        "sched_setscheduler": [(7,)],
        "sched_setparam": [(7,)],
        "sched_setattr": [(7,)],
        "setpriority": [(0, 7), (1, 0), (2, 0)],
        "ioprio_set": [(1, 7), (2, 0), (3, 0)],
        "prctl": [(4,), (41,)],
        "mmap": [(0, 1, 3, 0x40022)],
    }
    for name, several in others.items():
        assert [answer(code, machine, of[name], arguments) for arguments in several] == [refused] * len(several), name
    for name, arguments in (("mmap", (0, 1, 3, 0x21)), ("mmap", (0, 1, 3, 0x23)), ("fcntl", (0, 1031))):
        assert answer(code, machine, of[name], arguments) == uncounted
    assert answer(code, machine, of["mmap"], (0, 1, 3, 0x1)) == seccomp.ALLOW  # of a file
    assert (which, answer(code, machine, 0x40000000 + 41)) == (which, refused)


REFUSING = """
import asyncio, json, sys
from areal_x.errors import UserError
from areal_x.sandbox import seccomp
from areal_x.sandbox.pool import Sandbox, SandboxLimits
# A filter around the run, as a container's: it refuses these calls, and the first argument of those with one.
seccomp.REFUSED = seccomp.UNCOUNTED = {{}}
tests_of = lambda values: [seccomp.ArgumentTest(0, seccomp.EQUAL, value) for value in values]
seccomp.PARTLY_REFUSED = [seccomp.Rule(tuple(numbers), tests_of(values)) for numbers, values in {calls}]
assert not seccomp.install_filter(True)

async def main():
    sandbox = Sandbox(SandboxLimits(require_confined={strict}), workers=1, mechanisms={mechanisms})
    try:
        result = await sandbox.run("print(6 * 7)")
        print(json.dumps([result.output, result.confined]))
    except UserError as error:
        print(json.dumps([str(error)]))
    finally:
        await sandbox.close()

asyncio.run(main())
"""
NO_FILTER, NO_LANDLOCK, NO_NAMESPACES = ((157, 167), [22]), ((444, 444), []), ((272, 97), [])


def surrounded(refused, mechanisms, strict=False):
    """Returns what a program printed and whether it was confined, or the error; and the run's log."""
    script = REFUSING.format(calls=refused, mechanisms=mechanisms, strict=strict)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("mechanisms", [("root",), ("user",), ("landlock",)])
def test_a_filter_that_cannot_be_installed_is_known(mechanisms):
    (output, confined), log = surrounded([NO_FILTER], mechanisms)
    assert (output, confined) == ("42\n", False)
    assert log.count("programs in the sandbox can make any system call") == 1


def test_a_machine_without_namespaces_and_without_landlock_is_known():
    found, log = surrounded([NO_NAMESPACES, NO_LANDLOCK], ("root", "user", "landlock"))
    assert found == ["42\n", False]
    assert "can read and write this machine's files" in log
    found, _ = surrounded([NO_NAMESPACES], ("root", "user", "landlock"))
    assert found[0] == "42\n"


@pytest.mark.parametrize(
    ("refused", "words"),
    [([NO_FILTER], "make any system call"), ([NO_NAMESPACES, NO_LANDLOCK], "read and write this machine's files")],
)
def test_a_sandbox_that_must_be_confined_runs_nothing_where_it_is_not(refused, words):
    (error,), _ = surrounded(refused, ("root", "user", "landlock"), strict=True)
    assert error.startswith(f"sandbox.require_confined = True, and programs here could {words}")


def test_a_sandbox_that_must_be_confined_runs_programs_where_it_is():
    result = run("print(6 * 7)", limits=SandboxLimits(require_confined=True), mechanism="root")
    assert (result.output, result.confined) == ("42\n", True)
