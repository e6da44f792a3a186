"""The fork server of the sandbox: a process with its imports done, which only has to fork to start
a program. Started by `areal_x.sandbox.pool`.

    pool ──(one byte and a socket: a program comes)──▶ fork server ──fork──▶ supervisor ──fork──▶ [ init ──fork──▶ program ]
    pool ──(the program)──▶ socket ──▶ supervisor     program ──(output, report: pipes)──▶ supervisor ──(the result)──▶ pool

The fork server runs under a guard (areal_x.runtime.guard). Each program has a supervisor
(areal_x.sandbox.supervisor), which also ends it when the pool hangs up. If namespaces are allowed,
the brackets are a process namespace whose first process is `init`: when it ends, the kernel ends
the rest. Otherwise there is no `init`, and the supervisor finds the remaining processes as the
guard does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from areal_x.runtime import guard, memory_group
from areal_x.sandbox.isolation import choose, group_name
from areal_x.sandbox.supervisor import run_then_exit, supervise

# modules of the standard library, imported before a program needs them
PRELOADED = (
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "time",
    "typing",
)


def main(control_fd: int, lifeline_fd: int, base: str, settings: dict[str, Any]) -> None:
    """base: an empty folder of the pool's own, which the guard removes."""
    groups = partial(memory_group.remove_all, group_name(base, ""))
    guard.run_guarded(
        partial(serve, control_fd, base, settings),
        lifeline_fd,
        (control_fd,),
        folder=base,
        afterwards=groups,
    )


def serve(control_fd: int, base: str, settings: Mapping[str, Any]) -> NoReturn:
    """First reports the isolation and the failed imports; then starts a program per request, until
    the pool hangs up."""
    # without the first, this package's, which programs need not see
    sys.path[:] = [*sys.path[1:], *settings["packages"]]
    missing = {}
    for name in (*PRELOADED, *settings["imports"]):
        try:
            import_module(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    isolation = choose(base, settings["mechanisms"], settings["readable"], settings["groups"])
    gc.collect()
    gc.freeze()  # so that a collection in a program does not copy shared pages
    with socket.socket(fileno=control_fd) as control:
        control.sendall(
            json.dumps({"isolation": asdict(isolation), "missing": missing}).encode() + b"\n"
        )
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need not be waited for
        forker = os.getpid()
        while True:
            byte, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not byte:
                os._exit(0)
            if os.fork() == 0:
                guard.die_with_parent(forker)
                control.close()
                run_then_exit(
                    partial(supervise, socket.socket(fileno=fds[0]), isolation, base, settings)
                )
            os.close(fds[0])
