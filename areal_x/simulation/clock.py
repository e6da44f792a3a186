"""A virtual clock: an event loop whose time jumps to the next timer as soon as nothing else is left
to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits, and no timer is left that could wake one."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual seconds, from 0.

    Computing takes no time in it; `asyncio.sleep`, `asyncio.timeout` and `call_later` take theirs
    without anyone waiting. Other threads and processes are no part of it: what awaits a socket, a
    subprocess or an executor cannot run here. Raises: Deadlock, out of whatever runs the loop.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Where a loop would wait for the world, its time moves on."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(
                "nothing can happen any more: every task waits for something that no timer will"
                " bring"
            )
        if timeout > 0:
            self._loop.advance(timeout)
        return []


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """What the coroutine returns, and the virtual seconds that it took. Raises what it raises, or
    Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()
