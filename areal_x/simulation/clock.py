"""A virtual clock: an event loop whose time jumps to the next timer as soon as nothing else can
run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task is waiting, and no timer is left that could wake one."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual seconds, from 0.

    Computation takes no virtual time; `asyncio.sleep`, `asyncio.timeout` and `call_later` take
    virtual time only. Other threads and processes have no virtual time, so nothing that awaits a
    socket, a subprocess or an executor can run here.

    Raises: Deadlock, from the call that runs the loop.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Advances the loop's time where a loop would wait for I/O."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(
                "the simulation is deadlocked: every task is waiting, and no timer is left that"
                " could wake one"
            )
        if timeout > 0:
            self._loop.advance(timeout)
        return []


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Runs a coroutine on a virtual clock; returns its result and the virtual seconds that it took.
    Raises what it raises, or Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()
