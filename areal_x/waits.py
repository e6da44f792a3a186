"""Who waits for whom: every wait of a run by name, and a sentence when nothing has moved for too long.

    with waiting("the trainer", "the groups of step 7", lambda: f"{done} of 16 are finished"):
        groups = queue.take()

    with watching(message, log, rhythm):      # around a run
        ...

A wait that begins or ends is movement, and so is `moved()`, for work that goes on inside one wait. Silence is reported after 30
seconds, or three times the run's own rhythm where that is longer, and again each time it has lasted twice as long; not while
every wait is idle, as between two steps in a notebook.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from areal_x import background

SILENCE_SECONDS = 30.0
RHYTHMS = 3.0  # a silence is longer than so many steps of the run
SHOWN = 4  # waits in a message; the log has all
FILE = "waits.log"  # below a run's logs/


@dataclass(frozen=True)
class Wait:
    """who, what: as the sentence "who waits for what" reads. detail: more about the item, evaluated when it is reported. idle:
    for something to do. since: in seconds of time.monotonic."""

    who: str
    what: str
    detail: Callable[[], str] | None = None
    idle: bool = False
    since: float = field(default_factory=time.monotonic)

    def sentence(self, now: float) -> str:
        text = f"{self.who} has waited {now - self.since:.0f} s for {self.what}"
        try:
            more = self.detail() if self.detail is not None else ""
        except Exception as error:  # what it looks at belongs to another thread
            more = f"unknown: {error}"
        return f"{text} ({more})" if more else text


_open: dict[int, Wait] = {}  # every operation on it is one step to other threads
_numbers = itertools.count()
_last_moved = time.monotonic()


def moved() -> None:
    """Something went on."""
    global _last_moved
    _last_moved = time.monotonic()


@contextmanager
def waiting(who: str, what: str, detail: Callable[[], str] | None = None, *, idle: bool = False) -> Iterator[None]:
    """Names the wait in the body. idle: a wait for something to do, as workers and listeners have: it is no movement, and where
    all waits are idle nothing is wrong. A loop that retries is one wait, or each attempt would count as movement."""
    number = next(_numbers)
    _open[number] = Wait(who, what, detail, idle)
    if not idle:
        moved()
    try:
        yield
    finally:
        del _open[number]
        if not idle:
            moved()


def open_waits() -> list[Wait]:
    """Those that have not ended: the longest first, the idle ones last."""
    return sorted(_open.copy().values(), key=lambda wait: (wait.idle, wait.since))


@contextmanager
def watching(
    message: Callable[[str], None],
    log: Path,
    rhythm: Callable[[], float] = lambda: 0.0,
    silence_seconds: float = SILENCE_SECONDS,
) -> Iterator[None]:
    """Reports silences until the body ends. message: shows a sentence. log: a folder. rhythm: seconds of a usual step."""
    ended = threading.Event()
    moved()
    arguments = ended, message, log / FILE, rhythm, silence_seconds
    thread = background.thread(_watch, *arguments, what="the watch over waits", failed=lambda e: message(f"{e}"), name="waits")
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(
    ended: threading.Event, message: Callable[[str], None], log: Path, rhythm: Callable[[], float], silence_seconds: float
) -> None:
    moved_then, reported = _last_moved, 0.0
    while not ended.wait(silence_seconds / 30):
        if _last_moved != moved_then:
            moved_then, reported = _last_moved, 0.0
        silent = time.monotonic() - moved_then
        if is_due(silent, reported, max(silence_seconds, RHYTHMS * rhythm()), open_waits()):
            reported = silent
            write_log(log, silent)
            message(report(silent))


def is_due(silent: float, reported: float, limit: float, waits: Sequence[Wait]) -> bool:
    """Whether a silence of so many seconds is to be reported. reported: how long it was when it was reported last, else 0."""
    return silent >= max(limit, 2 * reported) and any(not wait.idle for wait in waits)


def report(silent_seconds: float) -> str:
    """One paragraph: for how long nothing has moved, and the waits that are longest."""
    now, waits = time.monotonic(), open_waits()
    sentences = [wait.sentence(now) for wait in waits[:SHOWN]]
    if len(waits) > SHOWN:
        sentences.append(f"{len(waits) - SHOWN} more waits are in logs/{FILE}")
    return f"nothing has moved for {silent_seconds:.0f} s: " + ("; ".join(sentences) or "and nobody waits")


def write_log(log: Path, silent_seconds: float) -> None:
    """Appends every open wait and the stacks of all threads. What cannot be written is not: a watch ends no run."""
    now = time.monotonic()
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} nothing has moved for {silent_seconds:.0f} s"]
    lines += [f"  {wait.sentence(now)}" for wait in open_waits()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        lines += [f"  thread {names.get(ident, ident)}", *(f"    {line}" for line in stack.splitlines())]
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError:
        return
