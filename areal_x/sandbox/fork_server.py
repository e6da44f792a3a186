"""Starts programs: a process that has its interpreter ready and only has to fork. What
`areal_x.sandbox.pool` starts.

    pool ──(one byte and a socket: a program comes)──▶ forker ──fork──▶ keeper ──fork──▶ [ first ──fork──▶ program ]
    pool ──(the program)──▶ socket ──▶ keeper     program ──(output, report: pipes)──▶ keeper ──(what became of it)──▶ pool

The forker runs under a guard (areal_x.runtime.guard). Each program has a keeper
(areal_x.sandbox.supervisor), which also ends it when the pool hangs up. Where namespaces are allowed
the brackets are one of processes, whose first is `first`: when it ends, the kernel ends the rest.
Elsewhere there is none, and the keeper looks for what is left as the guard does.
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

READY = (  # of the standard library, imported before a program asks for it
    *(
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
    ),
    *(
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
    ),
)


def main(control_fd: int, lifeline_fd: int, base: str, settings: dict[str, Any]) -> None:
    """base: an empty folder of the pool's own, which the guard removes."""
    groups = partial(memory_group.remove_all, group_name(base, ""))
    guard.keep(
        partial(serve, control_fd, base, settings),
        lifeline_fd,
        (control_fd,),
        folder=base,
        afterwards=groups,
    )


def serve(control_fd: int, base: str, settings: Mapping[str, Any]) -> NoReturn:
    """First says what the walls are and which imports failed; then starts what comes, until the
    pool hangs up."""
    # the first is this package's, which programs need not see
    sys.path[:] = [*sys.path[1:], *settings["packages"]]
    missing = {}
    for name in (*READY, *settings["imports"]):
        try:
            import_module(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    isolation = choose(base, settings["mechanisms"], settings["readable"], settings["groups"])
    gc.collect()
    gc.freeze()  # so that no collection in a program copies what all have in common
    with socket.socket(fileno=control_fd) as control:
        control.sendall(
            json.dumps({"isolation": asdict(isolation), "missing": missing}).encode() + b"\n"
        )
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no keeper needs to be waited for
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
