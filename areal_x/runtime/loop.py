"""Event loops on their own threads, for callers whose thread may already run one, as a notebook's
does."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from areal_x.runtime import background
from areal_x.runtime.interrupts import deferred_interrupts

T = TypeVar("T")
OLD = 1000  # younger collections before Python makes one of old objects by itself; 10 by default
COLLECT_SECONDS = 10.0

_collected_at = 0.0


def new_loop() -> asyncio.AbstractEventLoop:
    """Returns asyncio's own event loop. A library may have set another as the default, as Ray does in
    its processes where uvloop is installed, whose connections take other arguments."""
    return asyncio.SelectorEventLoop()


def run(work: Coroutine[Any, Any, T], name: str) -> T:
    """Runs a coroutine to its end on a new loop and thread of that name, and closes both. An
    interrupt cancels it.

    Raises: what the coroutine raises, or the error of a background task that ended unexpectedly.
    """
    loop = new_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        future.cancel()

    background.watch(loop, failed)
    # An interrupt between the thread's start and the wait for it would leave it running.
    with deferred_interrupts():
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
    """Returns or raises what the future does. Ctrl-C ends the wait."""
    with deferred_interrupts() as raise_if_interrupted:
        while not future.done():
            raise_if_interrupted()
            wait([future], timeout=0.2)
    return future.result()


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results. If one raises, the others are
    cancelled and awaited before its error propagates."""
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
    """Exempts all present objects from garbage collection until the end, and leaves those that grow
    old meanwhile to `collect`.

    A collection stops every thread while it traverses its objects: 240 ms with torch, transformers
    and vLLM imported, and 90 ms for 4,096 requests in flight, during which no event loop answers.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*before[:2], OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def collect() -> None:
    """Collects garbage of every age, unless that was done in the last ten seconds. Called once a
    step, while the servers are about to pause anyway."""
    global _collected_at
    if time.monotonic() - _collected_at >= COLLECT_SECONDS:
        gc.collect()
        _collected_at = time.monotonic()


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop on its own thread until it is stopped, then cancels the remaining tasks and closes
    it."""
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
