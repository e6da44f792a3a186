"""Ctrl-C and SIGTERM as a flag that a run checks between its calls.

A signal's exception could be raised anywhere: in a callback of the garbage collector or of a weak
reference, where the interpreter prints and drops it; inside a library that does not expect one and
crashes; between acquiring a lock and entering its block. So inside `deferred_interrupts` a signal
only sets a flag, and `raise_if_interrupted` raises KeyboardInterrupt where a run can end: between
two lines of the ring, two micro-batches, two polls of a wait. A second signal ends a run that does
not get there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Signals this close together count as one: a program that stops several processes may signal some
# of them twice.
SAME_SECONDS = 1.0
INTERRUPTED = 130  # exit status
FIRST = "stopping after the current operation; a second signal ends the process at once\n"
SECOND = "stopped at once by a second signal\n"


class _SignalHandler:
    """Sets a flag at the first signal. at_once: a second one ends the process; otherwise it raises
    KeyboardInterrupt where the process is."""

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._signalled_at: float | None = None  # time.monotonic()
        self.raised = False
        self.failure: Exception | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._signalled_at is None:
            self.request_stop()
            if sys.stderr.isatty():
                os.write(2, FIRST.encode())
        elif time.monotonic() - self._signalled_at > SAME_SECONDS:
            if not self._at_once:
                raise KeyboardInterrupt
            os.write(2, SECOND.encode())
            os._exit(INTERRUPTED)  # servers and workers have guards that end them

    def request_stop(self) -> None:
        self._signalled_at = time.monotonic()

    @property
    def signalled(self) -> bool:
        return self._signalled_at is not None

    def check(self, since_seconds: float = 0.0) -> None:
        """Raises KeyboardInterrupt, or the failure of `fail`, once."""
        self.raise_if_interrupted(since_seconds)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def raise_if_interrupted(self, since_seconds: float = 0.0) -> None:
        """Raises once only, so that closing is not interrupted again."""
        if self._signalled_at is None or self.raised:
            return
        if time.monotonic() - self._signalled_at >= since_seconds:
            self.raised = True
            raise KeyboardInterrupt


_current: _SignalHandler | None = None


def raise_if_interrupted(since_seconds: float = 0.0) -> None:
    """Raises: in the main thread, KeyboardInterrupt if a signal came at least this long ago, or the
    error of `fail`."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.check(since_seconds)


def fail(error: Exception) -> None:
    """Makes the main thread raise an error where it looks for interrupts, from any thread: something
    that the run needs is gone, whatever it waits for."""
    current = _current
    if current is not None:
        current.failure = error


def withdraw() -> None:
    """Takes back an error of `fail` that has not been raised."""
    current = _current
    if current is not None:
        current.failure = None


def request_stop() -> bool:
    """Sets the flag as a signal does, from any thread. Returns False if nothing checks it."""
    current = _current
    if current is not None:
        current.request_stop()
    return current is not None


@contextmanager
def deferred_interrupts(at_once: bool = False) -> Iterator[Callable[[], None]]:
    """Context in which Ctrl-C, and SIGTERM if it has the same handler, sets a flag. Yields a
    function that raises KeyboardInterrupt if the flag is set, or the error of `fail`; leaving the context does too, also in
    place of another exception, which the signal may have caused.

    A nested context shares the outer one's flag. On other threads than the main one, which never
    receive signals, it does nothing. at_once: see `_SignalHandler`.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    outer = _current
    handler = outer or _SignalHandler(at_once)
    ours = [
        n
        for n in (signal.SIGINT, signal.SIGTERM)
        if outer is None and signal.getsignal(n) is signal.default_int_handler
    ]
    _current = handler
    for number in ours:
        signal.signal(number, handler)
    try:
        yield handler.check
    except Exception as error:
        # Also one that took the place of an interrupt, as closing raised it: a run that then took
        # it for the loss of its processes would go on.
        if handler.signalled:
            handler.raised = True
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
        _current = outer
    handler.raise_if_interrupted()


def deferred_interrupts_in_each(make: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorator of a generator: interrupts are deferred while it computes a value, and not between
    values, when the caller's handlers are in place."""

    @wraps(make)
    def each(*arguments: P.args, **named: P.kwargs) -> Iterator[T]:
        work = make(*arguments, **named)
        end = object()
        try:
            while True:
                with deferred_interrupts():
                    made = next(work, end)
                if made is end:
                    return
                yield made  # type: ignore[misc]
        finally:
            with deferred_interrupts():
                work.close()  # type: ignore[attr-defined]

    return each


@contextmanager
def same_signals() -> Iterator[None]:
    """Keeps the handlers of Ctrl-C and SIGTERM, whatever the body sets: Ray's would end the process
    at once. A signal that comes during the body counts too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(n): signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    set_handler, alarm = signal.signal, signal.getitimer(signal.ITIMER_REAL)

    def keep(number: int, handler: Any) -> Any:
        return handlers[number] if number in handlers else set_handler(number, handler)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        # Ray's C++ code has set handlers too. They pass a signal on to those that they replaced, and
        # abort the process 3 s later by an alarm.
        for number, handler in handlers.items():
            set_handler(number, handler)
        if not any(alarm):
            signal.setitimer(signal.ITIMER_REAL, 0)
