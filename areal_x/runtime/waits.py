"""Names every wait of a run, and reports them when nothing has moved for too long.

    with waiting("the trainer", "the groups of step 7", lambda: f"{done} of 16 are finished"):
        groups = queue.take()

    with watching(message, log, rhythm):      # around a run
        ...

The name of the waiting part follows the work through tasks and threads: inside
`with on_behalf_of("episode 2")`, `whose()` returns it and code calls `waiting(whose(), …)`.

A wait that begins or ends counts as movement, and so does `moved()`, for progress inside one wait.
Silence is reported after 30 seconds, or after three times the duration of a step if that is longer,
and again whenever it has lasted twice as long; not while every wait is idle, as between two steps
in a notebook.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from areal_x.runtime import background

SILENCE_SECONDS = 30.0
STEPS = 3.0  # a silence is longer than this many steps of the run
SHOWN = 4  # waiting parts in a message; the log has all
FILE = "waits.log"  # below a run's logs/
STATE = "waits.json"  # beside it, while nothing moves: for those who look at the run
STATE_SECONDS = 5.0  # between two of its versions


@dataclass(frozen=True)
class Wait:
    """A wait, for the sentence "`who` waits for `what`"."""

    who: str
    what: str

    detail: str | Callable[[], str] = ""
    """More about the item; a function is called when the wait is reported."""

    idle: bool = False
    """True for a wait for something to do."""

    since: float = field(default_factory=time.monotonic)
    """Its start, in seconds of time.monotonic."""

    def about(self, now: float) -> str:
        """Describes how long the wait has lasted, and for what."""
        try:
            more = self.detail if isinstance(self.detail, str) else self.detail()
        except Exception as error:  # it reads another thread's data
            more = f"unknown: {error}"
        return f"{now - self.since:.0f} s for {self.what}{f' ({more})' if more else ''}"


_whose: ContextVar[str] = ContextVar("whose", default="the run")
_moves: ContextVar[bool] = ContextVar("moves", default=True)
_open: dict[int, Wait] = {}  # every operation on it is atomic for other threads
_numbers = itertools.count()
_last_moved = time.monotonic()


def moved() -> None:
    """Records progress."""
    global _last_moved
    if _moves.get():
        _last_moved = time.monotonic()


def whose() -> str:
    """Returns the name of the part that the calling code works for."""
    return _whose.get()


class _OnBehalfOf:
    __slots__ = ("_moves", "_tokens", "_who")

    def __init__(self, who: str, moves: bool) -> None:
        self._who, self._moves = who, moves

    def __enter__(self) -> None:
        self._tokens = _whose.set(self._who), _moves.set(self._moves and _moves.get())

    def __exit__(self, *_: object) -> None:
        _whose.reset(self._tokens[0])
        _moves.reset(self._tokens[1])


class _Waiting:
    __slots__ = ("_number", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._number = next(_numbers)
        _open[self._number] = self._wait
        if not self._wait.idle:
            moved()

    def __exit__(self, *_: object) -> None:
        del _open[self._number]
        if not self._wait.idle:
            moved()


# Classes and not generators: a request enters five of them, and each generator costs 1 µs and three
# more objects for the collector.
def on_behalf_of(who: str, *, moves: bool = True) -> AbstractContextManager[None]:
    """Names the part that the body, and all tasks and threads that it starts, work for. moves: False
    for work that repeats regardless of progress, such as heartbeats and retries: its waits are
    reported but do not count as movement."""
    return _OnBehalfOf(who, moves)


def waiting(
    who: str, what: str, detail: str | Callable[[], str] = "", *, idle: bool = False
) -> AbstractContextManager[None]:
    """Names the wait in the body. A loop that retries should be one wait, or each attempt would
    count as movement. idle: a wait for something to do, as of workers and listeners: it is no
    movement, and if all waits are idle nothing is wrong."""
    return _Waiting(Wait(who, what, detail, idle))


def open_waits() -> list[Wait]:
    """Returns the waits that have not ended, the longest first and the idle ones last."""
    return sorted(_open.copy().values(), key=lambda wait: (wait.idle, wait.since))


def doing(whose: str) -> str:
    """Summarises what the parts whose names begin with this wait for, by the latest wait of
    each."""
    last = {
        wait.who: wait
        for wait in sorted(_open.copy().values(), key=lambda wait: wait.since)
        if wait.who.startswith(whose)
    }
    found = Counter(wait.what for wait in last.values())
    return ", ".join(
        f"{count} {'waits' if count == 1 else 'wait'} for {what}"
        for what, count in found.most_common(SHOWN)
    )


@contextmanager
def watching(
    message: Callable[[str], None],
    log: Path,
    rhythm: Callable[[], float] = lambda: 0.0,
    silence_seconds: float | None = None,
) -> Iterator[None]:
    """Reports silences until the body ends. message: called with the report. log: folder of the log
    file. rhythm: returns the seconds of a usual step."""
    silence_seconds = SILENCE_SECONDS if silence_seconds is None else silence_seconds
    ended = threading.Event()
    moved()
    arguments = ended, message, log / FILE, rhythm, silence_seconds
    thread = background.thread(
        _watch,
        *arguments,
        what="the watch over waits",
        failed=lambda e: message(f"{e}"),
        name="waits",
    )
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(
    ended: threading.Event,
    message: Callable[[str], None],
    log: Path,
    rhythm: Callable[[], float],
    silence_seconds: float,
) -> None:
    moved_then, reported, written = _last_moved, 0.0, 0.0
    state = log.with_name(STATE)
    remove(state)  # of the run before it was resumed
    while not ended.wait(silence_seconds / 30):
        if _last_moved != moved_then:
            moved_then = _last_moved
            if reported:
                remove(state)
            reported = 0.0
        silent = time.monotonic() - moved_then
        if is_due(silent, reported, max(silence_seconds, STEPS * rhythm()), open_waits()):
            reported = written = silent
            write_log(log, silent)
            write_state(state, silent)
            message(report(silent))
        elif reported and silent >= written + STATE_SECONDS:
            written = silent
            write_state(state, silent)


def is_due(silent: float, reported: float, limit: float, waits: Sequence[Wait]) -> bool:
    """True if a silence of this many seconds should be reported. reported: its length at the last
    report, or 0."""
    return silent >= max(limit, 2 * reported) and any(not wait.idle for wait in waits)


def report(silent_seconds: float) -> str:
    """Returns one paragraph: how long nothing has moved, and the longest waits."""
    sentences = sentences_of(open_waits())
    more = (
        [f"{len(sentences) - SHOWN} more wait, see logs/{FILE}"] if len(sentences) > SHOWN else []
    )
    return f"nothing has moved for {silent_seconds:.0f} s: " + (
        "; ".join(sentences[:SHOWN] + more) or "and nothing waits"
    )


def sentences_of(waits: Sequence[Wait]) -> list[str]:
    """Returns a sentence per waiting part, in the order of their first waits, each from its outermost
    wait to its innermost."""
    now, of_each = time.monotonic(), dict[str, list[Wait]]()
    for wait in waits:
        of_each.setdefault(wait.who, []).append(wait)
    return [
        f"{who} has waited {', of these '.join(wait.about(now) for wait in theirs)}"
        for who, theirs in of_each.items()
    ]


def write_log(log: Path, silent_seconds: float) -> None:
    """Appends every open wait and the stacks of all threads. Errors are ignored: a log must not end
    the run."""
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} nothing has moved for {silent_seconds:.0f} s"]
    lines += [f"  {sentence}" for sentence in sentences_of(open_waits())]
    for name, stack in stacks():
        lines += [f"  thread {name}", *(f"    {line}" for line in stack.splitlines())]
    try:
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError:
        return


def write_state(file: Path, silent_seconds: float) -> None:
    """Writes, as JSON, what the log gets: when it was, the sentences, every open wait, and the
    stacks of all threads. Errors are ignored, as for the log."""
    now, waits = time.monotonic(), open_waits()
    state = {
        "time": time.time(),
        "silent_seconds": silent_seconds,
        "sentences": sentences_of(waits),
        "waits": [
            {"who": x.who, "about": x.about(now), "seconds": now - x.since, "idle": x.idle}
            for x in waits
        ],
        "threads": [{"name": name, "stack": stack} for name, stack in stacks()],
    }
    unfinished = file.with_name(f"{STATE}.new")
    try:
        file.parent.mkdir(exist_ok=True)
        unfinished.write_text(json.dumps(state), encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        return


def remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)


def stacks() -> list[tuple[str, str]]:
    """Returns the name and the stack of every thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        (str(names.get(ident, ident)), "".join(traceback.format_stack(frame)))
        for ident, frame in sys._current_frames().items()
    ]
