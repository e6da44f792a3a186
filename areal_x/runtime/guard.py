"""Guard processes: each ends a worker and everything that the worker started, whatever that did and
however the owner died.

    owner ──(lifeline: a pipe on which nothing is ever written)──▶ guard ──(SIGKILL to its process group)──▶ worker

The owner starts the guard. It forks the worker into a new process group and waits for the end of the
lifeline, which comes when the owner closes the pipe or dies. Then the guard kills the group and all
other descendants, in that group or out of it, and exits. Only the standard library is imported here.

Everything but the process group and the kernel's limits needs Linux; elsewhere a process that leaves
the group outlives the worker.
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

POLL_SECONDS = 0.1  # between two counts of the processes
# The signal that the guard dies of after its worker had too many processes, or used too much memory.
TOO_MANY = signal.SIGUSR1
TOO_MUCH = signal.SIGUSR2
END_SECONDS = 10.0  # for a guard to end its processes on a busy machine
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
LIBC = ctypes.CDLL(None, use_errno=True)
START = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from {} import main;"
    " main(*json.loads(sys.argv[2]))"
)


def command(module: str, *arguments: object, flags: Sequence[str] = ("-P",)) -> list[str]:
    """Returns the command line that runs `main(*arguments)` of a module of this package in a new
    interpreter. arguments: JSON values. flags: of the interpreter."""
    root = Path(__file__).resolve().parents[2]
    return [sys.executable, *flags, "-c", START.format(module), str(root), json.dumps(arguments)]


def run_guarded(
    work: Callable[[], None],
    lifeline_fd: int,
    owners_fds: tuple[int, ...] = (),
    processes: int | None = None,
    folder: str | None = None,
    ends_with_worker: bool = False,
    over_memory: Callable[[], bool] | None = None,
    afterwards: Callable[[], object] | None = None,
) -> None:
    """Forks a worker that runs `work`, while this process becomes its guard; does not return in the
    guard.

    owners_fds: descriptors on which the owner waits for the worker; the guard closes them.
    processes: most processes at once, including the worker. folder: deleted at the end.
    ends_with_worker: end all processes when the worker ends. over_memory: returns True if the
    descendants use too much memory. afterwards: called when all have ended.
    """
    become_subreaper()
    guarding = os.getpid()
    worker = os.fork()
    if worker:
        for fd in owners_fds:
            os.close(fd)
        guard(lifeline_fd, worker, processes, folder, ends_with_worker, over_memory, afterwards)
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
    over_memory: Callable[[], bool] | None = None,
    afterwards: Callable[[], object] | None = None,
) -> None:
    """Waits for the end of the lifeline or another reason to end, then ends all processes and
    exits."""
    with suppress(OSError):
        # Set in both processes, so that the group exists whichever runs first.
        os.setpgid(worker, worker)
    beyond: signal.Signals | None = None
    polls = processes is not None or ends_with_worker or over_memory is not None
    while beyond is None and not select([lifeline_fd], [], [], POLL_SECONDS if polls else None)[0]:
        if (
            ends_with_worker
            and os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ):
            break
        for child in children(os.getpid()):
            if child != worker:  # not yet reaped, so its number is not reused
                os.waitpid(child, os.WNOHANG)
        if processes is not None and has_more_than(processes):
            beyond = TOO_MANY
        elif over_memory is not None and over_memory():
            beyond = TOO_MUCH
    code = end_all(worker)
    if beyond is None and over_memory is not None and over_memory():  # the kernel killed first
        beyond = TOO_MUCH
    if folder is not None:
        remove_tree(folder)
    if afterwards is not None:
        afterwards()
    if beyond is not None:
        signal.signal(beyond, signal.SIG_DFL)
        os.kill(os.getpid(), beyond)
    sys.exit(shell_exit_code(code))


def become_subreaper() -> None:
    """Makes orphaned descendants this process's children; Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def end_all(worker: int) -> int:
    """Kills this process's child, the child's group and all other descendants. Returns the child's
    exit code."""
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # it may not have its own group yet
    return kill_descendants(worker)


def kill_descendants(worker: int | None = None) -> int:
    """Kills all descendants of this process, and returns when they are gone. Returns the exit code
    of a child, 0 without one."""
    code = 0
    with suppress(ChildProcessError):  # none is left
        while True:
            for pid in list(descendants(os.getpid())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            while pid:  # reap all that have ended before listing the rest again
                code = os.waitstatus_to_exitcode(status) if pid == worker else code
                pid, status = os.waitpid(-1, os.WNOHANG)
    return code


def shell_exit_code(code: int) -> int:
    """Returns an exit code as a shell reports it: 137 for -9, a signal."""
    return code if code >= 0 else 128 - code


def has_more_than(processes: int) -> bool:
    """True if this process has more descendants. Stops counting there: a process that forks
    endlessly would never be counted to the end."""
    return len(list(islice(descendants(os.getpid()), processes + 1))) > processes


def children(pid: int) -> list[int]:
    """Returns the children of a process; none without /proc or if the process has ended."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (Path.glob raises where it ends meanwhile)
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yields all descendants of a process, in breadth-first order."""
    waiting = deque([pid])
    while waiting:
        below = children(waiting.popleft())
        yield from below
        waiting += below


def wait_until_ended(guard: subprocess.Popen[bytes]) -> int:
    """Waits, in the owner, for a guard whose lifeline is closed. Returns its exit code.

    The guarded processes may stop the guard, repeatedly, unless a sandbox forbids that: it is
    continued until it ends. After `END_SECONDS` it is killed with all its descendants.
    """
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            return guard.wait(POLL_SECONDS)
        with suppress(OSError):
            os.kill(guard.pid, signal.SIGCONT)  # not yet waited for, so its number is not reused
    stopped: set[int] = set()
    # Stopped first, so that none forks while the others are found.
    while found := {guard.pid, *descendants(guard.pid)} - stopped:
        _signal(found, signal.SIGSTOP)
        stopped |= found
    _signal({*descendants(guard.pid), guard.pid}, signal.SIGKILL)
    return guard.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, number)


def set_limits(limits: Mapping[int, int]) -> None:
    """Sets the kernel's resource limits, by number, for this process and those that it starts, and
    disables core dumps."""
    for kind, most in {**limits, resource.RLIMIT_CORE: 0}.items():
        _, allowed = resource.getrlimit(kind)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))


def remove_tree(folder: str) -> None:
    """Deletes a folder and its contents, also subfolders without read permission."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            with suppress(OSError):  # (a link to elsewhere is not followed)
                if not (inner := Path(place, name)).is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def leave_network() -> bool:
    """Moves this process to a network namespace without devices. Returns False if that is not
    allowed. Unix sockets still work."""
    if sys.platform != "linux":
        return False
    if LIBC.unshare(CLONE_NEWNET) == 0:  # root
        return True
    if not works_in_a_child(lambda: enter_own_namespace(CLONE_NEWNET)):
        return False
    enter_own_namespace(CLONE_NEWNET)
    return True


def works_in_a_child(change: Callable[[], object]) -> bool:
    """True if an irreversible change of this process works, tried in a child: some machines allow a
    namespace and then nothing in it."""
    trial = os.fork()
    if trial == 0:
        try:
            change()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(trial, 0)[1] == 0


def enter_own_namespace(others: int) -> None:
    """Enters new namespaces: of users, with the same user inside, so that files keep their owner,
    and `others` (CLONE_NEW…).

    Raises: OSError if that is not allowed.
    """
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(CLONE_NEWUSER | others) != 0:
        raise OSError("no namespace is allowed")
    for name, content in {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }.items():
        Path(f"/proc/self/{name}").write_text(content)
