"""Starts one server for its owner (the run, or a keeper on another node) and ends it with the
owner, so that no process outlives it, even if it was killed with SIGKILL.

    owner ──▶ watchdog ──(socket pair)──▶ second watchdog ──▶ server ──▶ engine, workers, …

A server is a small family of processes; vLLM's engine process was seen to survive the death of its
front end, and a process may leave the family's process group. Both watchdogs are subreapers (on
Linux): orphans of the family become their children, wherever they went. The family is ended when the server ends,
when the watchdog gets SIGTERM, or when the owner is gone; in the last case FOLDER, the owner's staged
weights in shared memory, is removed too.

There are two because one may be killed: Ray kills the direct children of a process that ends. The
kernel then closes its end of the socket pair, and the other one ends the family.

The owner is watched by its process id. (PR_SET_PDEATHSIG would fire when the *thread* that started
the server ends.) Only the standard library is imported: a watchdog costs a few megabytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from select import select
from typing import NoReturn

from areal_x.runtime.guard import (
    become_subreaper,
    children,
    descendants,
    end_all,
    kill_descendants,
    shell_exit_code,
)

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
REST_SECONDS = 2.0


def main(
    owner: int, folder: str, command: Sequence[str], grace_seconds: float = GRACE_SECONDS
) -> NoReturn:
    """Runs the server and exits with its code. owner: its process id. folder: "" for none."""
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    own, others = socket.socketpair()
    second = os.fork()
    if second == 0:
        own.close()
        sys.exit(run_server(others, command, grace_seconds))
    others.close()
    code = 1
    try:
        while os.getppid() == owner:
            if select([own], [], [], POLL_SECONDS)[0]:  # the second watchdog has ended
                break
        else:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        own.close()
        code = shell_exit_code(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
        # It has ended, unless the second watchdog was killed: its children are now this one's.
        ask_to_end(children(os.getpid()), grace_seconds)
        kill_descendants()
    sys.exit(code)


def run_server(lifeline: socket.socket, command: Sequence[str], grace_seconds: float) -> int:
    """Runs the server in the second watchdog, until it ends or the lifeline does, and returns its
    exit code."""
    signal.signal(signal.SIGTERM, stop)
    become_subreaper()
    server = subprocess.Popen(command, process_group=0)
    try:
        while not select([lifeline], [], [], POLL_SECONDS)[0]:
            for child in children(os.getpid()):
                if child != server.pid:  # an orphan of the family
                    os.waitpid(child, os.WNOHANG)
            code = server.poll()
            if code is not None:
                return shell_exit_code(code)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask_to_end([server.pid] if server.returncode is None else [], grace_seconds)
        end_all(server.pid)


def stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def ask_to_end(asked: Iterable[int], grace_seconds: float) -> None:
    """Terminates these children (the server, which then ends its own family), then the rest.

    Python's resource tracker, which is in the family too, ends after the others and removes what
    they left in shared memory.
    """
    left = set(asked)
    terminate(left)
    with suppress(ChildProcessError):  # none is left
        until = time.monotonic() + grace_seconds
        while left and time.monotonic() < until:
            left -= reap()
            time.sleep(0.02)
        terminate(descendants(os.getpid()))
        until = time.monotonic() + REST_SECONDS
        while time.monotonic() < until:
            reap()
            time.sleep(0.02)


def reap() -> set[int]:
    """Returns the children that have ended since the last call. Raises: ChildProcessError if none
    is left."""
    ended = set()
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
        ended.add(pid)
    return ended


def terminate(pids: Iterable[int]) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
