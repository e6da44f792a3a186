"""A process that checks JSON against JSON schemas, started by areal_x.agents.json_checks.schemas.

    run ──(a line of JSON: schema, and a value or null)──▶ worker        worker ──(a line: the error, or null)──▶ run

Nothing else bounds such a check: the regular expressions of `pattern` backtrack, references can
double at each step, and most of the time is spent in calls that hold Python's lock. So the kernel
ends this process once a check has used its CPU time.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from areal_x.errors import nearest

Check = Callable[[Any], str | None]
MEMORY_BYTES = 1 << 30
MOST_FRAMES = 10_000  # a schema as deep as json_bounds allows needs about ten frames per level
MOST_CACHED = 64  # schemas, each of at most CACHED_CHARACTERS
CACHED_CHARACTERS = 1 << 14
SHOWN = 300  # characters of an error, which may quote a schema or a value


def main(path: list[str], cpu_seconds: float) -> None:
    """path: sys.path. cpu_seconds: processor time of a single check, after which this process ends."""
    sys.path[:] = path
    sys.setrecursionlimit(MOST_FRAMES)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        # its signal ends a process that does not handle it
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = answer(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def answer(schema: str, value: str | None, closed: bool) -> str | None:
    """Returns the error of a schema, or of a value if there is one. Both are JSON. closed: see
    `checker`."""
    try:
        if value is None:
            return schema_error(json.loads(schema))
        check = (
            cached_checker(schema, closed)
            if len(schema) <= CACHED_CHARACTERS
            else checker(json.loads(schema), closed)
        )
        return check(json.loads(value))
    except RecursionError:
        return "the schema refers to itself without an end"
    except Exception as error:  # unforeseen, from a library: an answer, not the end of the process
        return shorten(f"{type(error).__name__}: {error}")


@lru_cache(maxsize=MOST_CACHED)
def cached_checker(schema: str, closed: bool) -> Check:
    return checker(json.loads(schema), closed)


def schema_error(schema: Any) -> str | None:
    """Returns what is wrong with a JSON schema, or None."""
    import jsonschema

    try:
        _validator_class(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return shorten(error.message)
    return None


def checker(schema: Mapping[str, Any], closed: bool) -> Check:
    """Returns a function that returns what in a value does not match a JSON schema, or None.

    closed: a property that the schema does not name is a mismatch unless the schema says something
    about additional ones. References are never fetched.
    """
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    properties = schema.get("properties", {})
    closed = closed and "additionalProperties" not in schema and "properties" in schema
    validator = _validator_class(schema)(schema, registry=Registry())

    def check(value: Any) -> str | None:
        try:
            error = best_match(validator.iter_errors(value))
        except Unresolvable as missing:
            return shorten(f"the schema refers to {missing.ref}, which is not in it")
        if error is not None:
            place = ".".join(map(str, error.absolute_path))
            return shorten(f"{place}: {error.message}" if place else str(error.message))
        extra = (
            [name for name in value if name not in properties]
            if closed and isinstance(value, dict)
            else []
        )
        if not extra:
            return None
        return shorten(
            f"{extra[0]!r} is unknown; known are:"
            f" {', '.join(properties) or 'none'}{nearest(extra[0], list(properties))}"
        )

    return check


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def _validator_class(schema: Any) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for

    return validator_for(schema, default=Draft202012Validator)
