"""Keeps what another process starts: a guard that ends all of it, whatever it did and however its
owner died.

    owner ──(lifeline: a pipe on which nothing is ever written)──▶ guard ──(SIGKILL to its process group)──▶ worker

The process that the owner starts is the guard. It forks the worker into a process group of its own
and waits for the end of the lifeline, which comes when the owner lets go of it or is gone, however
it died. Then it kills the group, whatever the worker has started, in that group or out of it, and
ends. Only the standard library is imported here.

All but the process group and the kernel's limits needs Linux; elsewhere a process that leaves the
group outlives the worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from select import select

LOOK = 0.1  # seconds between two counts of processes
# How the guard ends where the worker had more processes, or they more memory, than they may; else
# it ends by itself.
TOO_MANY, TOO_MUCH = signal.SIGUSR1, signal.SIGUSR2
END_SECONDS = 10.0  # for a guard to end what it keeps, on a machine that is busy
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
LIBC = ctypes.CDLL(None, use_errno=True)
START = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from {} import main;"
    " main(*json.loads(sys.argv[2]))"
)


def command(module: str, *arguments: object, flags: Sequence[str] = ("-P",)) -> list[str]:
    """What starts `main(*arguments)` of a module of this very package in a new interpreter;
    arguments as JSON has them. flags: of the interpreter."""
    root = Path(__file__).resolve().parents[2]
    return [sys.executable, *flags, "-c", START.format(module), str(root), json.dumps(arguments)]


def keep(
    work: Callable[[], None],
    lifeline_fd: int,
    owners_fds: tuple[int, ...] = (),
    processes: int | None = None,
    folder: str | None = None,
    ends_with_worker: bool = False,
    too_much: Callable[[], bool] | None = None,
    afterwards: Callable[[], object] | None = None,
) -> None:
    """Does `work` in the worker, while this process becomes its guard; does not return in the
    guard.

    owners_fds: on which the owner waits for the worker, so that the guard must not hold them.
    processes: the most at once, the worker among them. folder: removed at the end.
    ends_with_worker: all of it ends when the worker does, too. too_much: whether what is below this
    process uses more memory than it may. afterwards: done when all has ended.
    """
    if sys.platform == "linux":
        # what is left without a parent below becomes the guard's child
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    guarding = os.getpid()
    worker = os.fork()
    if worker:
        for fd in owners_fds:
            os.close(fd)
        guard(lifeline_fd, worker, processes, folder, ends_with_worker, too_much, afterwards)
    os.setpgid(0, 0)
    os.close(lifeline_fd)
    die_with_parent(guarding)
    work()


def guard(
    lifeline_fd: int,
    worker: int,
    processes: int | None,
    folder: str | None,
    ends_with_worker: bool = False,
    too_much: Callable[[], bool] | None = None,
    afterwards: Callable[[], object] | None = None,
) -> None:
    """Waits for the end of the lifeline, or of what else should end all of them, and then for
    that."""
    with suppress(OSError):
        # in both processes, so that the group exists whoever comes first
        os.setpgid(worker, worker)
    beyond: signal.Signals | None = None
    looks = processes is not None or ends_with_worker or too_much is not None
    while beyond is None and not select([lifeline_fd], [], [], LOOK if looks else None)[0]:
        if (
            ends_with_worker
            and os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ):
            break
        for child in children(os.getpid()):
            if child != worker:  # not reaped yet, so that the number is still its own
                os.waitpid(child, os.WNOHANG)
        if processes is not None and more_than(processes):
            beyond = TOO_MANY
        elif too_much is not None and too_much():
            beyond = TOO_MUCH
    code = end_all(worker)
    if beyond is None and too_much is not None and too_much():  # the kernel was first
        beyond = TOO_MUCH
    if folder is not None:
        remove(folder)
    if afterwards is not None:
        afterwards()
    if beyond is not None:
        signal.signal(beyond, signal.SIG_DFL)
        os.kill(os.getpid(), beyond)
    sys.exit(as_a_shell(code))


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the process that forked it is gone; Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_all(worker: int) -> int:
    """Kills this process's child with its group and all that is left of what was started below; the
    child's exit code."""
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # before it has a group of its own
    code = 0
    with suppress(ChildProcessError):  # there is none left
        while True:
            for pid in list(descendants(os.getpid())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            while pid:  # all that have ended, before the rest is looked at anew
                code = os.waitstatus_to_exitcode(status) if pid == worker else code
                pid, status = os.waitpid(-1, os.WNOHANG)
    return code


def as_a_shell(code: int) -> int:
    """An exit code that says a signal (-9) as a shell does (137)."""
    return code if code >= 0 else 128 - code


def more_than(processes: int) -> bool:
    """Whether more run below this one. Looks no further than needed: of one that forks without end
    it would never see all."""
    return len(list(islice(descendants(os.getpid()), processes + 1))) > processes


def children(pid: int) -> list[int]:
    """Where there is no /proc, or no such process any more, none."""
    found: list[int] = []
    with suppress(OSError):  # it has ended, perhaps just now
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (Path.glob raises where it ends meanwhile)
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """Near ones first, however deep they are."""
    waiting = deque([pid])
    while waiting:
        below = children(waiting.popleft())
        yield from below
        waiting += below


def ended(guard: subprocess.Popen[bytes]) -> int:
    """Waits for a guard whose lifeline is cut, in its owner; its exit code.

    What it keeps may have stopped it, where no wall forbids that, and may do so again: it is woken
    until it ends. After `END_SECONDS` it is killed with all that is below it.
    """
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            return guard.wait(LOOK)
        with suppress(OSError):
            os.kill(guard.pid, signal.SIGCONT)  # not waited for yet, so that the number is its own
    stopped: set[int] = set()
    # so that none of them forks while the rest is found
    while found := {guard.pid, *descendants(guard.pid)} - stopped:
        _signal(found, signal.SIGSTOP)
        stopped |= found
    _signal({*descendants(guard.pid), guard.pid}, signal.SIGKILL)
    return guard.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, number)


def limit(kernels: Mapping[int, int]) -> None:
    """What each process may use, this one and those that it starts, by the resource's number. A
    core of one that crashed is nobody's."""
    for kind, most in {**kernels, resource.RLIMIT_CORE: 0}.items():
        _, allowed = resource.getrlimit(kind)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))


def remove(folder: str) -> None:
    """A folder with all that is in it, also where its owner took away the right to look into a
    part."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            with suppress(OSError):  # (a link that points elsewhere is left as it is)
                if not (inner := Path(place, name)).is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def leave_network() -> bool:
    """Moves to a network of its own, without any device that leads out; whether that was allowed.
    Unix sockets stay."""
    if sys.platform != "linux":
        return False
    if LIBC.unshare(CLONE_NEWNET) == 0:  # root
        return True
    if not allowed(lambda: enter_own_namespace(CLONE_NEWNET)):
        return False
    enter_own_namespace(CLONE_NEWNET)
    return True


def allowed(change: Callable[[], object]) -> bool:
    """Whether a change of this process that cannot be taken back works, as another one tries it
    first: some machines allow a namespace and then nothing in it."""
    trial = os.fork()
    if trial == 0:
        try:
            change()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(trial, 0)[1] == 0


def enter_own_namespace(others: int) -> None:
    """One of users and `others` (CLONE_NEW…), with the same user within: files stay its own. Raises
    OSError."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(CLONE_NEWUSER | others) != 0:
        raise OSError("no namespace is allowed")
    for name, content in {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }.items():
        Path(f"/proc/self/{name}").write_text(content)
