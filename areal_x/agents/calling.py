"""Calls users' agents: functions, async or plain, on an event loop beside that of the caller.

A worker on another machine imports this, and so no package of the gateway's.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from areal_x.runtime import background
from areal_x.runtime.loop import serve
from areal_x.runtime.thread import in_thread
from areal_x.types import Task

T = TypeVar("T")
AgentResult = float | str | None
Solve = Callable[[Task, str, str], Awaitable[AgentResult] | AgentResult]


async def call_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of an async function, or of a plain one, which runs on a thread of its
    own, so that any number may block at once."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await function(*arguments)
    given = await in_thread(function, *arguments)
    return await given if inspect.isawaitable(given) else given


class BackgroundLoop:
    """An event loop on a thread of its own: code that blocks there does not stall generation."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result, awaited from another loop. Cancelling this cancels it
        there."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            failed = background.on_loop()
            background.watch(self._loop, failed)
            self._thread = background.thread(
                serve, self._loop, what="the agents' thread", failed=failed, name="agents"
            )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = None
