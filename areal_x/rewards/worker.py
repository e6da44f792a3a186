"""The process that runs a reward function, started by `areal_x.rewards.pool`.

    pool ──(a reward, then tasks and texts)──▶ socket ──▶ worker        worker ──(JSON lines)──▶ socket ──▶ pool

It runs under a guard (areal_x.runtime.guard). Until the pool has sent its sys.path, only the
standard library and this package are imported; after that, whatever the reward's own module
imports. The limits are enforced by the kernel (memory, files, network) and by the guard (processes,
and memory if no control group can be made).
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial, reduce
from importlib import import_module
from typing import Any, BinaryIO

from areal_x.errors import place_of, traceback_of
from areal_x.runtime import footprint, guard, memory_group

FRAME_BYTES = 8  # size of the length that precedes each message to the worker
# Added to the limit of all processes together, so that a single process exceeds its own limit first
# and gets a MemoryError that it can report.
SPARE_BYTES = 50e6


def main(
    socket_fd: int, lifeline_fd: int, limits: dict[str, Any], name: str, may_group: bool
) -> None:
    """Runs the worker under a guard. name: unique to this worker. may_group: whether to make a
    control group."""
    most = limits["memory_gb"] * 1e9 + SPARE_BYTES
    place = memory_group.find(f"{name}.trial") if may_group else None
    group = None if place is None else memory_group.create(place, f"{name}.all", most)

    def too_much() -> bool:
        return (
            group.overrun()
            if group is not None
            else footprint.memory_bytes(list(guard.descendants(os.getpid())), most) > most
        )

    guard.run_guarded(
        lambda: work(socket_fd, limits, group),
        lifeline_fd,
        (socket_fd,),
        limits["processes"],
        over_memory=too_much,
        afterwards=partial(memory_group.remove_all, f"{name}."),
    )


def work(
    socket_fd: int, limits: dict[str, Any], group: memory_group.MemoryGroup | None = None
) -> None:
    if group is not None:
        group.enter()
    guard.set_limits(
        {
            resource.RLIMIT_DATA: int(limits["memory_gb"] * 1e9),
            resource.RLIMIT_NOFILE: limits["files"],
            resource.RLIMIT_FSIZE: int(limits["file_gb"] * 1e9),
        }
    )
    offline = limits["network"] or guard.leave_network()
    with socket.socket(fileno=socket_fd) as ring:
        serve(ring, offline)


def serve(ring: socket.socket, offline: bool) -> None:
    """Answers messages until the pool hangs up: first the reward itself, then one task after the
    other. offline: False if the network should be blocked and is not."""
    messages = ring.makefile("rb")

    def answer(**content: Any) -> None:
        ring.sendall(json.dumps(content, allow_nan=False).encode() + b"\n")

    sys.path[:] = json.loads(receive(messages) or b"[]")
    # The pool's messages to its own child are trusted; those in the other direction are only JSON.
    from cloudpickle import loads

    import_module("areal_x.types")  # tasks need it: imported before any task's time limit starts
    try:
        reward = resolve(*loads(receive(messages)))
    except BaseException as error:
        return answer(error=one_line(error))
    answer(ready=True, offline=offline)
    while message := receive(messages):
        try:
            task, text = loads(message)
            value, details = as_numbers(reward(task, text))
        except BaseException as error:  # SystemExit too: a reward that calls exit() has failed
            answer(error=one_line(error), traceback=traceback_of(error))
        else:
            answer(reward=value, details=details)
    return None


def receive(messages: BinaryIO) -> bytes:
    """The next message; empty if the pool has hung up."""
    length = messages.read(FRAME_BYTES)
    return messages.read(int.from_bytes(length, "big")) if len(length) == FRAME_BYTES else b""


def resolve(
    where: str | None, function: Callable[..., Any] | None, bound: dict[str, Any]
) -> Callable[..., Any]:
    """The reward with its bound parameters: imported from "module:qualified.name", or the function
    that was sent."""
    if where is not None:
        module, name = where.split(":")
        found: Any = import_module(module)
        function = reduce(getattr, name.split("."), found)
    assert function is not None
    return partial(function, **bound)


def as_numbers(result: Any) -> tuple[float, dict[str, float]]:
    """Converts the result of a reward to (reward, details). Raises: TypeError or ValueError for
    anything but finite numbers."""
    value, details = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    return number("the reward", value), {
        str(name): number(f"the reward's {name!r}", x) for name, x in dict(details).items()
    }


def number(what: str, value: Any) -> float:
    if not hasattr(value, "__float__"):  # a string has none: "1.0" is a mistake, not a number
        raise TypeError(f"{what} is {short(repr(value))}, not a number")
    plain = float(value)
    if not math.isfinite(plain):
        raise ValueError(f"{what} is {plain}, not a finite number")
    return plain


def one_line(error: BaseException) -> str:
    """The error's type and message, shortened, and the line of the user's code that raised it."""
    place = place_of(error)
    text = short(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    return f"{text} ({place})" if place else text


def short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
