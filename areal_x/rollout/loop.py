"""Event loops on threads of their own, for callers whose own thread may run one already, as a notebook's does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], name: str) -> T:
    """Runs a coroutine to its end on a loop and a thread of that name, both gone when this returns. An interrupt cancels it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=serve, args=(loop,), name=name, daemon=True)
    thread.start()
    try:
        return result(asyncio.run_coroutine_threadsafe(work, loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def result(future: Future[T]) -> T:
    """What the future gives or raises. Ctrl-C ends the waiting."""
    while not future.done():  # in short waits: a signal that comes just before a wait does not end it, and Ctrl-C would be lost
        wait([future], timeout=0.5)
    return future.result()


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, then cancels what is left on it: what a loop's own thread does."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
