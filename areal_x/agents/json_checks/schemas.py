"""JSON schemas that models, agents and tool servers bring, and values checked against them.

A check may take arbitrarily long, so it runs in a process that the kernel ends after CPU_SECONDS of
processor time; the event loop only waits. This is the one place that validates schemas.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from areal_x.agents.json_checks import json_bounds, schema_worker
from areal_x.errors import UserError
from areal_x.runtime import guard
from areal_x.runtime.thread import in_pool

MODULE = "areal_x.agents.json_checks.schema_worker"
PROCESSES = 2
CPU_SECONDS = 0.5  # per check; the largest useful ones take about 10 ms
CHARACTERS = 1 << 18  # of a schema, and of a value
MOST_CACHED = 1024  # schemas that a session does not check again

Schema = Mapping[str, Any]

_pool = ThreadPoolExecutor(PROCESSES, thread_name_prefix="areal-x schemas")
_own = threading.local()  # each thread's process
_all: list[subprocess.Popen[bytes]] = []


async def schema_error(schema: Any) -> str | None:
    """Returns why this is not a JSON schema, or too expensive to check; None for a valid one."""
    return await _check(json.dumps(schema), None, False)


def trusted_schema_error(schema: Any) -> str | None:
    """Returns why this is not a JSON schema, or None: for a schema from the user's own code, checked
    in this process without a time limit."""
    _require_jsonschema()
    return schema_worker.schema_error(schema)


def type_error(schema: Schema) -> str | None:
    """Returns why this schema cannot describe a tool's arguments, which are an object; None if it
    can."""
    if schema and (kind := schema.get("type", "object")) != "object":
        return f"they must be of type 'object', not {str(kind)[:100]!r}"
    return None


async def mismatch(schema: Schema, value: str) -> str | None:
    """Returns what in a value, a JSON text, does not match the schema, or None."""
    return await _check(json.dumps(schema), value, False)


async def arguments_mismatch(parameters: Schema, arguments: str) -> str | None:
    """Returns what in a tool's arguments, a JSON text, does not match its parameters, or None. An
    unknown property is a mismatch unless the parameters say otherwise."""
    return await _check(json.dumps({**parameters, "type": "object"}), arguments, True)


async def matches(schema: Schema, text: str) -> bool:
    """Returns True if a text is JSON that matches the schema; False also for one that is too
    expensive to check."""
    try:
        json_bounds.loads(text)
    except ValueError:
        return False
    return await mismatch(schema, text) is None


@dataclass
class CheckedSchemas:
    """The valid schemas of one session, by digest: agents send the same ones with each request."""

    _valid: set[bytes] = field(default_factory=set)

    async def error(self, schema: Schema) -> str | None:
        """Returns what `schema_error` does."""
        digest = blake2b(json.dumps(schema, sort_keys=True).encode()).digest()
        if digest in self._valid:
            return None
        error = await schema_error(schema)
        if error is None and len(self._valid) < MOST_CACHED:
            self._valid.add(digest)
        return error


async def _check(schema: str, value: str | None, closed: bool) -> str | None:
    """value: None to check the schema itself. closed: see schema_worker.checker."""
    for what, text in (("the schema", schema), ("the value", value or "")):
        if len(text) > CHARACTERS:
            return f"{what} has {len(text)} characters, more than {CHARACTERS}"
        try:
            json_bounds.check(text)
        except json_bounds.TooMuch as error:
            return f"{what} {error}"
    return await in_pool(_pool, _request, json.dumps([schema, value, closed]).encode() + b"\n")


def _request(line: bytes) -> str | None:
    """Returns the answer of this pool thread's process, which is started if it is not running."""
    process: subprocess.Popen[bytes] | None = getattr(_own, "process", None)
    if process is None or process.poll() is not None:
        process = _own.process = _start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = b""
    if not answer:
        _end(process)
        return f"it takes more than {CPU_SECONDS:g} s to check"
    error: str | None = json.loads(answer)
    return error


def _start() -> subprocess.Popen[bytes]:
    _require_jsonschema()
    process = subprocess.Popen(
        guard.command(MODULE, sys.path, CPU_SECONDS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is the run's to handle
    )
    _all.append(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
    _all.remove(process)


def _require_jsonschema() -> None:
    if importlib.util.find_spec("jsonschema") is None:
        raise UserError("tools and agents need jsonschema: pip install 'areal-x[agents]'")


@atexit.register
def _end_all() -> None:
    for process in list(_all):
        _end(process)
