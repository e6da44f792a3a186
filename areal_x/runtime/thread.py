"""Functions that block, for an event loop that must not."""

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

INLINE = 1 << 14  # characters, or as much other work: some milliseconds at most
BESIDE = ThreadPoolExecutor(4, thread_name_prefix="areal-x beside")


class OneThread:
    """Runs functions one after the other in a thread of its own, as some objects allow no other.

    The thread starts with the first function. It keeps no process from ending, so that a function
    which never returns costs a thread and nothing else; that is also why asyncio.to_thread is not
    used, whose few threads all of the process share.
    """

    def __init__(self, name: str = "areal-x blocking") -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What the function returns, or raises. Cancelled, it goes on, and nobody hears of it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def tell(told: Callable[[Any], None], what: Any) -> None:
            if not done.done():  # else it was cancelled
                told(what)

        def work() -> None:
            told: Callable[[Any], None] = done.set_result
            what: Any
            try:
                what = context.run(function, *arguments, **named)
            except StopIteration as error:  # no future can hold one
                told, what = done.set_exception, RuntimeError(f"StopIteration: {error}")
            except BaseException as error:
                told, what = done.set_exception, error
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(tell, told, what))

        self._put(work)
        with waiting(
            whose(), "a function on a thread", lambda: f"{name_of(function)} on {self._name}"
        ):
            return await done

    def tell(self, function: Callable[[], object]) -> None:
        """Does it after all that was asked before; nobody hears of how it went."""

        def work() -> None:
            with suppress(Exception):
                function()

        self._put(work)

    def close(self) -> None:
        """Ends the thread once it has done what was asked of it before. Safe to call twice."""
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
            del work  # what it holds is not kept until there is other work


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """One function in a thread that is only for it."""
    thread = OneThread()
    try:
        return await thread.run(function, *arguments, **named)
    finally:
        thread.close()


async def beside(size: int, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What a function returns whose work is bounded and grows with `size`: at once where that is
    little, else by one of a few threads, so that the loop turns meanwhile. Not for functions that
    may never return, nor for long calls into libraries that hold Python's lock."""
    return (
        function(*arguments, **named)
        if size <= INLINE
        else await in_pool(BESIDE, function, *arguments, **named)
    )


async def in_pool(
    pool: Executor, function: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    context = contextvars.copy_context()
    with waiting(whose(), "a function on a thread", lambda: name_of(function)):
        return await asyncio.get_running_loop().run_in_executor(
            pool, partial(context.run, function, *arguments, **named)
        )


def name_of(function: Callable[..., object]) -> str:
    """For messages."""
    return str(getattr(function, "__qualname__", type(function).__name__))
