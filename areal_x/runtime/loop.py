"""Event loops on threads of their own, for callers whose own thread may run one already, as a
notebook's does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from areal_x.runtime import background
from areal_x.runtime.interrupts import noted

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], name: str) -> T:
    """Runs a coroutine to its end on a loop and a thread of that name, both gone when this returns.
    An interrupt cancels it.

    Raises what it raises, or what ended unexpectedly beside it.
    """
    loop = asyncio.new_event_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        future.cancel()

    background.watch(loop, failed)
    thread = background.thread(serve, loop, what=f"the thread {name}", failed=failed, name=name)
    try:
        return result(future)
    except CancelledError:
        if failures:
            raise failures[0] from failures[0].__cause__
        raise
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def result(future: Future[T]) -> T:
    """What the future gives or raises. Ctrl-C ends the waiting."""
    with noted() as check:
        while not future.done():
            check()
            wait([future], timeout=0.2)
    return future.result()


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, run concurrently. When one raises, the others are cancelled and awaited
    before its error goes on."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@contextmanager
def short_collections() -> Iterator[None]:
    """Python's collector leaves alone what is there now, until the end.

    It stops every thread while it looks through all objects: 240 ms where torch, transformers and
    vLLM are imported, in which no loop answers.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, then cancels what is left on it: what a loop's own thread
    does."""
    asyncio.set_event_loop(loop)
    try:
        background.serve(loop)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
