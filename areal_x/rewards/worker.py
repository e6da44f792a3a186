"""A process that runs a reward function: what `areal_x.rewards.pool` starts, one worker at a time.

    ring ──(a reward, then tasks and texts)──▶ socket ──▶ worker        worker ──(JSON lines)──▶ socket ──▶ ring

It runs under a guard (areal_x.runtime.guard). Until the ring has sent its sys.path only the
standard library and this package are imported; after that, what the reward's own module imports.
What keeps a reward within its limits is the kernel (memory, files, network) or the guard
(processes, and memory where no control group can be made).
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

FRAME_BYTES = 8  # of the length before each message to the worker
# so that a single process meets the kernel's limit on it first, and can read what happened
SPARE_BYTES = 50e6


def main(
    socket_fd: int, lifeline_fd: int, limits: dict[str, Any], name: str, may_group: bool
) -> None:
    """name: of no other worker. may_group: whether a control group may be made."""
    most = limits["memory_gb"] * 1e9 + SPARE_BYTES
    place = memory_group.find(f"{name}.trial") if may_group else None
    group = None if place is None else memory_group.create(place, f"{name}.all", most)

    def too_much() -> bool:
        return (
            group.overrun()
            if group is not None
            else footprint.memory(list(guard.descendants(os.getpid())), most) > most
        )

    guard.keep(
        lambda: work(socket_fd, limits, group),
        lifeline_fd,
        (socket_fd,),
        limits["processes"],
        too_much=too_much,
        afterwards=partial(memory_group.remove_all, f"{name}."),
    )


def work(
    socket_fd: int, limits: dict[str, Any], group: memory_group.MemoryGroup | None = None
) -> None:
    if group is not None:
        group.enter()
    guard.limit(
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
    """Answers until the ring hangs up: first to the reward itself, then to each task. offline: as
    it was asked to be."""
    messages = ring.makefile("rb")

    def answer(**content: Any) -> None:
        ring.sendall(json.dumps(content, allow_nan=False).encode() + b"\n")

    sys.path[:] = json.loads(receive(messages) or b"[]")
    # what the ring sends its own child is trusted; what comes back is only JSON
    from cloudpickle import loads

    import_module("areal_x.types")  # tasks are made of it, and no task's time should pay for that
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
            answer(error=one_line(error), traceback=traceback_of(error))
        else:
            answer(reward=value, details=details)
    return None


def receive(messages: BinaryIO) -> bytes:
    """The next message, or nothing when the ring has hung up."""
    length = messages.read(FRAME_BYTES)
    return messages.read(int.from_bytes(length, "big")) if len(length) == FRAME_BYTES else b""


def resolve(
    where: str | None, function: Callable[..., Any] | None, bound: dict[str, Any]
) -> Callable[..., Any]:
    """The reward: imported from "module:qualified.name", or as it was sent, with its parameters."""
    if where is not None:
        module, name = where.split(":")
        found: Any = import_module(module)
        function = reduce(getattr, name.split("."), found)
    assert function is not None
    return partial(function, **bound)


def judged(result: Any) -> tuple[float, dict[str, float]]:
    """What a reward returned as plain numbers. Raises TypeError or ValueError for anything but
    finite ones."""
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
    """Its type and message, shortened, and the line of the user's code that it comes from."""
    place = place_of(error)
    text = short(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    return f"{text} ({place})" if place else text


def short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
