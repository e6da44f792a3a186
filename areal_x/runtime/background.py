"""Background tasks, threads and callbacks whose exceptions end the run.

Nothing receives their exceptions: asyncio keeps a task's until the task is awaited, a thread prints
it, and whatever waits for their work waits forever. So each is started here, under a name, and an
exception is reported: from an event loop to the function that `watch` set (the run's), from a
thread to the function that its owner passed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from areal_x.errors import EngineError, UserError

T = TypeVar("T")
Failed = Callable[[BaseException], None]

LOG = logging.getLogger(__name__)
OUR_MODULES = ("areal_x.", "areal_x_jax.", "areal_x_torch.")

_watched: WeakKeyDictionary[asyncio.AbstractEventLoop, Failed] = WeakKeyDictionary()


class Unexpected(UserError):
    """A background task, thread or callback ended with an exception, which is its cause."""


def watch(loop: asyncio.AbstractEventLoop, failed: Failed) -> None:
    """Sets the function that is called, on the loop's thread, with the exceptions of background work
    on this loop."""
    _watched[loop] = failed


def start(work: Coroutine[Any, Any, T], what: str, failed: Failed | None = None) -> asyncio.Task[T]:
    """Starts a task on the running loop. what: subject of the sentence about its exception. failed:
    called with the exception instead of the function that watches the loop."""
    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(partial(_done, what, failed))
    return task


def thread(
    function: Callable[..., object], *arguments: Any, what: str, failed: Failed, name: str = ""
) -> threading.Thread:
    """Starts a daemon thread. failed: called on that thread with the exception of the function."""

    def run() -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failed(described(what, error))

    made = threading.Thread(target=run, name=name or what, daemon=True)
    made.start()
    return made


def future(function: Callable[[], T], name: str) -> Future[T]:
    """Runs a function on a daemon thread, and returns the future of its result."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def on_loop() -> Failed:
    """Returns a function that threads call to report an exception to the running loop's watcher."""
    loop = asyncio.get_running_loop()

    def failed(error: BaseException) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, loop, error)

    return failed


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped. Exceptions in this project's callbacks are reported, also
    those that would end the loop (SystemExit): it goes on, so that open resources can be closed."""
    loop.set_exception_handler(_unhandled)
    while True:
        try:
            loop.run_forever()
            return
        except BaseException as error:
            report(loop, described("the event loop was interrupted", error))


def report(loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
    """Reports an exception to the loop's watcher, on the loop's thread; logs it if there is none."""
    failed = _watched.get(loop)
    if failed is None:
        LOG.error("%s", error, exc_info=error)
    else:
        failed(error)


def described(what: str, error: BaseException) -> BaseException:
    """Returns an exception whose message is one sentence; an EngineError or UserError is one
    already."""
    if isinstance(error, EngineError | UserError):
        return error
    text = " ".join(str(error).split())
    wrapped = Unexpected(
        f"{what} ended with {type(error).__name__}{f': {text}' if text else ''}{_place(error)}"
    )
    wrapped.__cause__ = error
    return wrapped


def _place(error: BaseException) -> str:
    """Returns this project's innermost line in the traceback, or the line that raised."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
    ]
    ours = [frame for frame in frames if frame[0].startswith(OUR_MODULES) and frame[0] != __name__]
    return "".join(f" ({Path(file).name}, line {line})" for _, file, line in (ours or frames)[-1:])


def _done(what: str, failed: Failed | None, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if failed is not None:
        failed(error)
    else:
        report(task.get_loop(), described(what, error))


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the loop; asyncio calls it for broken transports and libraries' tasks,
    too."""
    error, handle = context.get("exception"), context.get("handle")
    if error is not None and handle is not None and _is_ours(getattr(handle, "_callback", None)):
        report(loop, described("a callback", error))
    else:
        loop.default_exception_handler(context)


def _is_ours(callback: Any) -> bool:
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__module__", "")).startswith(OUR_MODULES)
