"""What runs beside the caller: a task, a thread or a callback of ours that ends with an exception
ends the run with it.

An exception there has nobody to go to: asyncio keeps it until somebody asks, a thread prints it,
and what waits for their work waits for ever. So each is begun here, under a name, and its
unexpected end is reported: of an event loop to whoever watches the loop (a run), of a thread to
whom its owner says.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from areal_x.errors import EngineError, UserError

T = TypeVar("T")
Failed = Callable[[BaseException], None]

LOG = logging.getLogger(__name__)
OURS = ("areal_x.", "areal_x_jax.", "areal_x_torch.")

_watched: WeakKeyDictionary[asyncio.AbstractEventLoop, Failed] = WeakKeyDictionary()


class Unexpected(UserError):
    """Something that runs beside the run ended with an exception. The exception is its cause."""


def watch(loop: asyncio.AbstractEventLoop, failed: Failed) -> None:
    """failed: told, on the loop's thread, of each unexpected end on this loop."""
    _watched[loop] = failed


def start(work: Coroutine[Any, Any, T], what: str, failed: Failed | None = None) -> asyncio.Task[T]:
    """A task of the running loop. what: begins the sentence about its end. failed: told instead of
    who watches the loop."""
    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(partial(_done, what, failed))
    return task


def thread(
    function: Callable[..., object], *arguments: Any, what: str, failed: Failed, name: str = ""
) -> threading.Thread:
    """A thread that keeps no process from ending, begun. failed: told there of what the function
    raises."""

    def run() -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failed(described(what, error))

    made = threading.Thread(target=run, name=name or what, daemon=True)
    made.start()
    return made


def on_loop() -> Failed:
    """For threads: reports to who watches the loop that runs now."""
    loop = asyncio.get_running_loop()

    def failed(error: BaseException) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, loop, error)

    return failed


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped. Exceptions in callbacks of ours are reported; those that
    end a loop (SystemExit) are too, and do not end it, so that what is open can be closed."""
    loop.set_exception_handler(_unhandled)
    while True:
        try:
            loop.run_forever()
            return
        except BaseException as error:
            report(loop, described("the event loop was interrupted", error))


def report(loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
    """On the loop's thread."""
    failed = _watched.get(loop)
    if failed is None:
        LOG.error("%s", error, exc_info=error)
    else:
        failed(error)


def described(what: str, error: BaseException) -> BaseException:
    """One sentence; what is one already stays as it is."""
    if isinstance(error, EngineError | UserError):
        return error
    text = " ".join(str(error).split())
    wrapped = Unexpected(
        f"{what} ended with {type(error).__name__}{f': {text}' if text else ''}{_place(error)}"
    )
    wrapped.__cause__ = error
    return wrapped


def _place(error: BaseException) -> str:
    """The last line of ours that it came through, else the line that raised it."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
    ]
    ours = [frame for frame in frames if frame[0].startswith(OURS) and frame[0] != __name__]
    return "".join(f" ({Path(file).name}, line {line})" for _, file, line in (ours or frames)[-1:])


def _done(what: str, failed: Failed | None, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if failed is not None:
        failed(error)
    else:
        report(task.get_loop(), described(what, error))


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's handler of what nobody else handles: also of broken transports and of the tasks of
    libraries."""
    error, handle = context.get("exception"), context.get("handle")
    if error is not None and handle is not None and _is_ours(getattr(handle, "_callback", None)):
        report(loop, described("a callback", error))
    else:
        loop.default_exception_handler(context)


def _is_ours(callback: Any) -> bool:
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__module__", "")).startswith(OURS)
