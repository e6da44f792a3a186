"""Starts one vLLM server for a run and ends it with the run, so that no process outlives the run,
even if the run was killed with SIGKILL.

    python watchdog.py OWNER_PID FOLDER COMMAND...

A server is a small family of processes, and vLLM's engine process was seen to survive the death of
its front end. The watchdog puts the family into a process group of its own and ends the whole group
when the server ends, when the watchdog gets SIGTERM, or when the owner is gone; in the last case it
also removes FOLDER, the owner's staged weights in shared memory.

The owner is watched by its process id. (PR_SET_PDEATHSIG would fire when the *thread* that started
the server ends.) This file runs as a script and imports only the standard library: it costs a few
megabytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import NoReturn

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
REST_SECONDS = 2.0


def stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def main(owner: int, folder: str, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(command, process_group=0)
    try:
        while os.getppid() == owner:
            code = server.poll()
            if code is not None:
                return code if code >= 0 else 128 - code
            time.sleep(POLL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Terminates the server, so that it ends its own family, then the rest of the group, which is
    killed in the end.

    Python's resource tracker, which is in the group too, ends after the others and removes what
    they left in shared memory.
    """
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        until = time.monotonic() + REST_SECONDS
        while time.monotonic() < until:
            server.poll()
            os.killpg(server.pid, 0)
            time.sleep(0.02)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
