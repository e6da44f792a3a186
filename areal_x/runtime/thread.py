"""Runs blocking functions on threads for an event loop, which must not block."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from areal_x.runtime import background
from areal_x.runtime.waits import waiting, whose

P = ParamSpec("P")
T = TypeVar("T")

INLINE = 1 << 14  # characters, or as much other work: a few milliseconds at most
POOL = ThreadPoolExecutor(4, thread_name_prefix="areal-x pool")


class OneThread:
    """Runs functions one after the other on one dedicated thread, as objects need that are bound to
    a thread.

    The thread starts with the first function. It is a daemon thread, so a function that never
    returns costs only that thread; asyncio.to_thread would occupy one of the few threads that the
    whole process shares.
    """

    def __init__(self, name: str = "areal-x blocking") -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Returns or raises what the function does. After a cancellation it runs to its end
        unobserved."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():  # else it was cancelled
                set_outcome(outcome)

        def work() -> None:
            set_outcome: Callable[[Any], None] = done.set_result
            outcome: Any
            try:
                outcome = context.run(function, *arguments, **named)
            except StopIteration as error:  # a future cannot hold one
                set_outcome = done.set_exception
                outcome = RuntimeError(f"StopIteration: {error}")
            except BaseException as error:
                set_outcome = done.set_exception
                outcome = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(settle, set_outcome, outcome))

        self._put(work)
        with waiting(
            whose(), "a function on a thread", lambda: f"{name_of(function)} on {self._name}"
        ):
            return await done

    def run_unobserved(self, function: Callable[[], object]) -> None:
        """Runs a function after those before it, without waiting for it and ignoring its errors."""

        def work() -> None:
            with suppress(Exception):
                function()

        self._put(work)

    def close(self) -> None:
        """Ends the thread after the functions that it has received. Safe to call twice."""
        self._work.put(None)

    def _put(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            failed = background.on_loop()
            self._thread = background.thread(
                self._serve, what=f"the thread {self._name}", failed=failed, name=self._name
            )

    def _serve(self) -> None:
        while True:
            with waiting(f"the thread {self._name}", "something to do", idle=True):
                work = self._work.get()
            if work is None:
                return
            work()
            del work  # or its objects would live until the next function


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Runs one function on a thread of its own."""
    thread = OneThread()
    try:
        return await thread.run(function, *arguments, **named)
    finally:
        thread.close()


async def inline_or_in_pool(
    size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Runs a function whose work is bounded and grows with `size`: directly if that is small,
    otherwise on one of a few threads, so that the event loop stays responsive. Not for functions
    that may never return, nor for long calls into libraries that hold Python's global lock."""
    return (
        function(*arguments, **named)
        if size <= INLINE
        else await in_pool(POOL, function, *arguments, **named)
    )


async def in_pool(
    pool: Executor, function: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Runs a function on a pool's thread, in the caller's context variables."""
    context = contextvars.copy_context()
    with waiting(whose(), "a function on a thread", lambda: name_of(function)):
        return await asyncio.get_running_loop().run_in_executor(
            pool, partial(context.run, function, *arguments, **named)
        )


def name_of(function: Callable[..., object]) -> str:
    """Returns a function's name for messages."""
    return str(getattr(function, "__qualname__", type(function).__name__))
