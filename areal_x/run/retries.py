"""Restarts a run's process after a crash.

    supervisor ── areal-x train FILE.gin --resume=auto ──▶ the run's process      again, when it crashes

Nothing inside a process survives its crash (a segmentation fault, the system's out-of-memory killer),
so another process watches it. It imports no framework and holds no lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from areal_x.run import checkpoint
from areal_x.runtime import guard
from areal_x.runtime.interrupts import INTERRUPTED

METRICS = "metrics.jsonl"
LONGEST_PAUSE = 60.0  # seconds; the first is one second, each further one twice as long
STOPPED = (INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


def run_with_retries(
    command: Sequence[str],
    run: Path,
    retries: int,
    message: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Runs a command that begins or continues a run, and again after each crash, `retries` times at
    most. Returns the status of the last: 0 if the run has finished.

    A command that is stopped (Ctrl-C, SIGTERM) is not run again, nor one that ends with an error
    before its first step: a mistake in the settings would only be repeated. run: its directory.
    """
    for attempt in range(retries + 1):
        before = _written(run)
        status, stopped = _run(command)
        if status == 0 or stopped or status in STOPPED:
            return status
        if status > 0 and _written(run) == before:
            return status
        saved = checkpoint.steps(run)
        where = f"continues from step {saved[-1]}" if saved else "begins again"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if attempt == retries:
            message(f"the run {how}; no retry is left of {retries}")
            return status if status > 0 else 128 - status
        message(f"the run {how}; it {where} (retry {attempt + 1} of {retries})")
        pause(min(2.0**attempt, LONGEST_PAUSE))
    raise AssertionError("unreachable")


def _written(run: Path) -> int:
    """Returns the bytes of the metrics that a run has written."""
    file = run / METRICS
    return file.stat().st_size if file.is_file() else 0


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs a command in a session of its own and passes signals on, so that each reaches it once,
    whether a terminal sends it to both or a scheduler to this process alone. Returns its status
    and True if a signal asked it to stop."""
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(
            command, start_new_session=True, preexec_fn=partial(_end_with, os.getpid())
        )
        if received:  # before there was a child
            child.send_signal(received[-1])
        return child.wait(), bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with(parent: int) -> None:
    """Has the system send this process SIGTERM when its parent dies, as of SIGKILL, so that no run
    is left over."""
    if sys.platform == "linux":
        guard.LIBC.prctl(guard.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)
