"""Ctrl-C and SIGTERM as notes, at which a run looks between its calls.

As an exception a signal could come anywhere: in a callback of the garbage collector's or of a weak
reference's, where the interpreter prints and forgets it; inside a library that does not expect one,
which then crashes; between taking a lock and holding it. So while `noted` lasts it only leaves a
note, and `check` raises KeyboardInterrupt where a run can end: between two lines of the ring, two
micro-batches, two looks at what is waited for. A second signal ends what does not get there.
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
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# in which a second signal is the first one's: who stops several processes signals some of them
# twice
SAME_SECONDS = 1.0
INTERRUPTED = 130  # exit status
FIRST = "stopping after what runs now; a second signal ends it at once\n"
SECOND = "stopped at once, by a second signal\n"


class _Notes:
    """A signal's handler. at_once: a second signal ends the process, else it raises
    KeyboardInterrupt where it comes."""

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._came: float | None = None  # a monotonic time
        self._raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self.note()
            if sys.stderr.isatty():
                os.write(2, FIRST.encode())
        elif time.monotonic() - self._came > SAME_SECONDS:
            if not self._at_once:
                raise KeyboardInterrupt
            os.write(2, SECOND.encode())
            os._exit(INTERRUPTED)  # servers and workers have guards of their own, which end them

    def note(self) -> None:
        self._came = time.monotonic()

    def check(self) -> None:
        """Raises once: what closes afterwards waits for its ends undisturbed."""
        if self._came is not None and not self._raised:
            self._raised = True
            raise KeyboardInterrupt


_current: _Notes | None = None


def check() -> None:
    """Raises KeyboardInterrupt, in the main thread, where a signal was noted."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.check()


def note() -> bool:
    """Leaves a note as a signal does, from any thread; whether there is somebody who looks."""
    current = _current
    if current is not None:
        current.note()
    return current is not None


@contextmanager
def noted(at_once: bool = False) -> Iterator[Callable[[], None]]:
    """Ctrl-C, and SIGTERM where it does the same, as a note. The function that this gives raises
    it, and leaving does: in the place of an exception too, which may have come of the signal.

    Within another one this is that one; on another thread than the main one, which alone is told of
    signals, it does nothing. at_once: what a second signal does, see `_Notes`.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    outer, notes = _current, _current or _Notes(at_once)
    ours = [
        n
        for n in (signal.SIGINT, signal.SIGTERM)
        if outer is None and signal.getsignal(n) is signal.default_int_handler
    ]
    _current = notes
    for number in ours:
        signal.signal(number, notes)
    try:
        yield notes.check
    except Exception as error:
        try:
            notes.check()
        except KeyboardInterrupt as stopped:
            raise stopped from error
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
        _current = outer
    notes.check()


def noted_in_each(make: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """For a generator: notes while it works and not in between, where the handlers are whoever's
    who asks for its values."""

    @wraps(make)
    def each(*arguments: P.args, **named: P.kwargs) -> Iterator[T]:
        work = make(*arguments, **named)
        end = object()
        try:
            while True:
                with noted():
                    made = next(work, end)
                if made is end:
                    return
                yield made  # type: ignore[misc]
        finally:
            with noted():
                work.close()  # type: ignore[attr-defined]

    return each
