"""A process that runs a reward function: what `areal_x.rewards.pool` starts, one worker at a time.

    ring ──(a reward, then tasks and texts)──▶ socket ──▶ worker        worker ──(JSON lines)──▶ socket ──▶ ring
    ring ──(lifeline: a pipe on which nothing is ever written)──▶ guard ──(SIGKILL to its process group)──▶ worker

The process that the pool starts is the guard. It forks the worker into a process group of its own and waits for the end of the
lifeline, which comes when the pool lets go of it or when the ring is gone, however it died. Then it kills the group, whatever
the reward has started, in that group or out of it, and ends. Started as a file, so until the ring has sent its sys.path only
the standard library is imported; after that, what the reward's own module imports.

What keeps a reward within its limits is the kernel (memory, files, network) or the guard (processes, at every LOOK). All but
the process group and the kernel's limits needs Linux; elsewhere a process that leaves the group outlives the reward.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, reduce
from importlib import import_module
from itertools import islice
from pathlib import Path
from select import select
from typing import Any, BinaryIO

FRAME_BYTES = 8  # of the length before each message to the worker
LOOK = 0.1  # seconds between two counts of processes
TOO_MANY = signal.SIGUSR1  # how the guard ends where the reward had more processes than it may; else it ends by itself
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
LIBC = ctypes.CDLL(None)


def main(socket_fd: int, lifeline_fd: int, limits: dict[str, Any]) -> None:
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what is left without a parent below becomes the guard's child
    guarding = os.getpid()
    worker = os.fork()
    if worker:
        os.close(socket_fd)
        guard(lifeline_fd, worker, limits["processes"])
    else:
        os.setpgid(0, 0)
        os.close(lifeline_fd)
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guarding:
                os._exit(1)
        limit(limits)
        offline = limits["network"] or leave_network()
        with socket.socket(fileno=socket_fd) as ring:
            serve(ring, offline)


def guard(lifeline_fd: int, worker: int, processes: int) -> None:
    """Waits for the end of the lifeline, or for too many processes, and then for the end of all of them."""
    with suppress(OSError):
        os.setpgid(worker, worker)  # in both processes, so that the group exists whoever comes first
    too_many = False
    while not too_many and not select([lifeline_fd], [], [], LOOK)[0]:
        for child in children(os.getpid()):
            if child != worker:  # not reaped yet, so that the number is still its own
                os.waitpid(child, os.WNOHANG)
        # No further than needed: of one that forks without end the guard would never have seen all.
        too_many = len(list(islice(descendants(os.getpid()), processes + 1))) > processes
    os.killpg(worker, signal.SIGKILL)
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
    if too_many:
        signal.signal(TOO_MANY, signal.SIG_DFL)
        os.kill(os.getpid(), TOO_MANY)
    sys.exit(code if code >= 0 else 128 - code)  # as a shell says it


def children(pid: int) -> list[int]:
    """Where there is no /proc, none."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            found += map(int, thread.read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """Near ones first."""
    below = children(pid)
    yield from below
    for child in below:
        yield from descendants(child)


def limit(limits: dict[str, Any]) -> None:
    """What each process may use, this one and those that it starts. A core of one that crashed is nobody's."""
    kernels = {
        resource.RLIMIT_DATA: int(limits["memory_gb"] * 1e9),
        resource.RLIMIT_NOFILE: limits["files"],
        resource.RLIMIT_FSIZE: int(limits["file_gb"] * 1e9),
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in kernels.items():
        _, allowed = resource.getrlimit(kind)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))


def leave_network() -> bool:
    """Moves to a network of its own, without any device that leads out; whether that was allowed. Unix sockets stay."""
    if sys.platform != "linux":
        return False
    if LIBC.unshare(CLONE_NEWNET) == 0:  # root
        return True
    # Some machines allow the namespace and then nothing in it, and no process can go back: another one tries it first.
    trial = os.fork()
    if trial == 0:
        try:
            enter_own_namespace()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(trial, 0)[1] != 0:
        return False
    enter_own_namespace()
    return True


def enter_own_namespace() -> None:
    """One of users and one of networks, with the same user within: files stay its own. Raises OSError where it may not."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        raise OSError("no namespace is allowed")
    for name, content in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        Path(f"/proc/self/{name}").write_text(content)


def serve(ring: socket.socket, offline: bool) -> None:
    """Answers until the ring hangs up: first to the reward itself, then to each task. offline: as it was asked to be."""
    messages = ring.makefile("rb")

    def answer(**content: Any) -> None:
        ring.sendall(json.dumps(content, allow_nan=False).encode() + b"\n")

    sys.path[:] = json.loads(receive(messages) or b"[]")
    from cloudpickle import loads  # what the ring sends its own child is trusted; what comes back is only JSON

    try:
        reward = resolve(*loads(receive(messages)))
    except BaseException as error:
        return answer(error=one_line(error))
    answer(ready=True, offline=offline)
    while message := receive(messages):
        try:
            task, text = loads(message)
            value, details = judged(reward(task, text))
        except BaseException as error:  # SystemExit too: a reward that calls exit() has failed
            answer(error=one_line(error))
        else:
            answer(reward=value, details=details)
    return None


def receive(messages: BinaryIO) -> bytes:
    """The next message, or nothing when the ring has hung up."""
    length = messages.read(FRAME_BYTES)
    return messages.read(int.from_bytes(length, "big")) if len(length) == FRAME_BYTES else b""


def resolve(where: str | None, function: Callable[..., Any] | None, bound: dict[str, Any]) -> Callable[..., Any]:
    """The reward: imported from "module:qualified.name", or as it was sent, with its parameters."""
    if where is not None:
        module, name = where.split(":")
        found: Any = import_module(module)
        function = reduce(getattr, name.split("."), found)
    assert function is not None
    return partial(function, **bound)


def judged(result: Any) -> tuple[float, dict[str, float]]:
    """What a reward returned as plain numbers. Raises TypeError or ValueError for anything but finite ones."""
    value, details = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    return number("the reward", value), {str(name): number(f"the reward's {name!r}", x) for name, x in dict(details).items()}


def number(what: str, value: Any) -> float:
    if not hasattr(value, "__float__"):  # a string has none: "1.0" is a mistake, not a number
        raise TypeError(f"{what} is {short(repr(value))}, not a number")
    plain = float(value)
    if not math.isfinite(plain):
        raise ValueError(f"{what} is {plain}, not a finite number")
    return plain


def one_line(error: BaseException) -> str:
    return short(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
