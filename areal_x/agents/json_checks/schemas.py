"""JSON schemas that models, agents and servers of tools bring, checked where a check may take as
long as it likes: in a process that the kernel ends after CPU_SECONDS. The event loop only waits."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal_x.agents.json_checks import json_bounds
from areal_x.runtime import guard
from areal_x.runtime.thread import in_pool

MODULE = "areal_x.agents.json_checks.schema_worker"
PROCESSES = 2
CPU_SECONDS = 0.5  # of one check: the largest that are of any use take some 10 ms
CHARACTERS = 1 << 18  # of a schema, and of a value

_pool = ThreadPoolExecutor(PROCESSES, thread_name_prefix="areal-x schemas")
_own = threading.local()  # each thread's process
_all: list[subprocess.Popen[bytes]] = []


async def wrong(schema: Any) -> str | None:
    """Why this is no JSON schema, or one that costs too much to check; None for a good one."""
    return await _ask(json.dumps(schema), None, False)


async def misfit(schema: Mapping[str, Any], value: str, *, closed: bool = False) -> str | None:
    """What of a value, given as JSON, does not fit the schema; None where all does. closed: see
    schema_worker.checker."""
    return await _ask(json.dumps(schema), value, closed)


async def _ask(schema: str, value: str | None, closed: bool) -> str | None:
    for what, text in (("the schema", schema), ("the value", value or "")):
        if len(text) > CHARACTERS:
            return f"{what} has {len(text)} characters, more than {CHARACTERS}"
        try:
            json_bounds.check(text)
        except json_bounds.TooMuch as error:
            return f"{what} {error}"
    return await in_pool(_pool, _asked, json.dumps([schema, value, closed]).encode() + b"\n")


def _asked(line: bytes) -> str | None:
    """In a thread of the pool: the answer of its process, which is started where it has none."""
    process: subprocess.Popen[bytes] | None = getattr(_own, "process", None)
    if process is None or process.poll() is not None:
        process = _own.process = _started()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = b""
    if not answer:
        _ended(process)
        return f"it takes more than {CPU_SECONDS:g} s to check"
    said: str | None = json.loads(answer)
    return said


def _started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        guard.command(MODULE, sys.path, CPU_SECONDS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is the run's to handle
    )
    _all.append(process)
    return process


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
    _all.remove(process)


@atexit.register
def _close() -> None:
    for process in list(_all):
        _ended(process)
