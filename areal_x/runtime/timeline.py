"""The timeline of a run: spans of its parts, kept in memory and written as a trace for Perfetto
(ui.perfetto.dev).

    with timeline.span("update", step=3):          # anywhere, on any thread
        ...
    with timeline.span("generate", ticket=7) as span:
        span.note(tokens=12)

A span costs about three microseconds (benchmarks/timeline.py). Each lane keeps its newest spans:
thousands of steps of the trainer, which has a dozen spans per step, and thousands of generation
requests. The process has one recorder, the one of the run that began last.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

FILE = "timeline.json"
CAPACITY = 20_000  # spans per lane: about 3 MB of trace
# While a run goes on its file is renewed, at most this often and for at most this share of the time.
LEAST_SECONDS = 10.0
LARGEST_SHARE = 0.001

# The lane of each span. In every lane but the trainer's, which is one thread, several spans may be
# open at once.
TRAINER, ENGINE, EPISODES, GENERATION, REWARDS = LANES = (
    "trainer",
    "engine",
    "episodes",
    "generation",
    "rewards",
)
LANE_OF = {
    "wait": TRAINER,
    "log-probabilities": TRAINER,
    "update": TRAINER,
    "publish": TRAINER,
    "stage": TRAINER,
    "checkpoint": TRAINER,
    "evaluate": TRAINER,
    # with train.colocate: the servers go to sleep, then the trainer's state returns or leaves
    "sleep": TRAINER,
    "wake": TRAINER,
    "rest": TRAINER,
    "pause": ENGINE,
    "prove": ENGINE,
    "episode": EPISODES,
    "generate": GENERATION,
    "reward": REWARDS,
}


class Interval(NamedTuple):
    """A span that ended, from `start` to `end` in seconds of time.perf_counter."""

    name: str
    start: float
    end: float
    arguments: dict[str, Any]

    def shifted(self, seconds: float) -> Interval:
        """Returns the span on a clock that is ahead by these seconds."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class Recorder:
    """Keeps the newest `capacity` spans of each lane. Any thread may add spans."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.began = time.perf_counter()
        self._kept: dict[str, deque[Interval]] = {lane: deque(maxlen=capacity) for lane in LANES}
        self._open: dict[int, Span] = {}
        # Lanes of other processes, which are fetched when the timeline is written.
        self.sources: list[Callable[[], Sequence[tuple[str, Interval]]]] = []
        self._fetched: dict[str, deque[Interval]] = {}
        self._capacity = capacity
        self._due = self.began + LEAST_SECONDS

    @property
    def lanes(self) -> tuple[str, ...]:
        return (*LANES, *sorted(self._fetched, key=lambda lane: (len(lane), lane)))

    def fetch(self) -> None:
        """Adds the spans of the sources, each with its lane, that have ended since the last time."""
        for source in self.sources:
            for lane, interval in source():
                kept = self._fetched.setdefault(lane, deque(maxlen=self._capacity))
                kept.append(interval)

    def add(self, name: str, start: float, end: float, **arguments: Any) -> None:
        self._kept[LANE_OF[name]].append(Interval(name, start, end, arguments))

    def of(self, lane: str) -> list[Interval]:
        """Returns the spans of a lane that ended, in the order of their ends, and then the open ones
        up to now."""
        if lane in self._fetched:
            return list(self._fetched[lane])
        now = time.perf_counter()
        running = [
            Interval(s.name, s.start, now, s.arguments)
            for s in list(self._open.values())
            if LANE_OF[s.name] == lane
        ]
        # copying a deque is atomic for other threads; iterating is not
        return [*self._kept[lane].copy(), *running]

    def take(self) -> list[Interval]:
        """Returns the spans of all lanes that ended, and forgets them."""
        found = []
        for kept in self._kept.values():
            while kept:
                found.append(kept.popleft())
        return found

    def idle_share(self, lane: str, start: float, end: float) -> float:
        """Returns the fraction of the time from start to end with no open span in the lane."""
        busy, until = 0.0, start
        for interval in sorted(i[1:3] for i in self.of(lane) if i.end > start and i.start < end):
            first, last = max(interval[0], until), min(interval[1], end)
            busy, until = busy + max(last - first, 0.0), max(until, last)
        return 1 - busy / (end - start) if end > start else 0.0

    def write(self, run: Path) -> Path:
        """Writes timeline.json atomically and returns its path."""
        began = time.perf_counter()
        self.fetch()
        file, unfinished = run / FILE, run / (FILE + ".new")
        unfinished.write_text(
            json.dumps({"traceEvents": trace_events(self), "displayTimeUnit": "ms"}),
            encoding="utf-8",
        )
        ended = time.perf_counter()
        self._due = ended + max(LEAST_SECONDS, (ended - began) / LARGEST_SHARE)
        return unfinished.replace(file)

    def renew(self, run: Path) -> None:
        """Writes timeline.json if it was not written for a while, for those who look at a run that
        goes on. One that cannot be written now is written later."""
        if time.perf_counter() >= self._due:
            self._due += LEAST_SECONDS
            with suppress(OSError):
                self.write(run)


class Span:
    """A context manager that records its own duration, also when it ends with an error."""

    __slots__ = ("arguments", "name", "recorder", "start")

    def __init__(self, recorder: Recorder, name: str, arguments: dict[str, Any]) -> None:
        self.recorder, self.name, self.arguments = recorder, name, arguments

    def note(self, **arguments: Any) -> None:
        """Adds arguments that are known only now."""
        self.arguments |= arguments

    def __enter__(self) -> Span:
        self.start = time.perf_counter()
        self.recorder._open[id(self)] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.recorder._kept[LANE_OF[self.name]].append(
            Interval(self.name, self.start, time.perf_counter(), self.arguments)
        )
        del self.recorder._open[id(self)]


_current = Recorder()


def span(name: str, **arguments: Any) -> Span:
    """Returns a span of the current run, as a context manager. name: a key of LANE_OF."""
    return Span(_current, name, arguments)


def add(name: str, start: float, end: float, **arguments: Any) -> None:
    """Adds a span that was already measured."""
    _current.add(name, start, end, **arguments)


def begin() -> Recorder:
    """Begins a timeline of this process, and returns its recorder."""
    global _current
    _current = Recorder()
    return _current


@contextmanager
def recording(run: Path) -> Iterator[Recorder]:
    """Begins a run's timeline, and writes it at the end, also after an error."""
    recorder = begin()
    try:
        yield recorder
    finally:
        recorder.write(run)


def trace_events(recorder: Recorder) -> list[dict[str, Any]]:
    """Returns trace events, complete ones ("ph": "X") with times in microseconds: one process per
    lane, with as many threads as spans are open at once."""
    events: list[dict[str, Any]] = []
    for pid, lane in enumerate(recorder.lanes, start=1):
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane}}
        )
        events.append(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": pid,
                "tid": 0,
                "args": {"sort_index": pid},
            }
        )
        intervals = sorted(recorder.of(lane), key=lambda i: (i.start, -i.end))
        for interval, row in zip(
            intervals, rows_of(intervals, nested=lane == TRAINER), strict=True
        ):
            start, duration = (
                round(1e6 * x)
                for x in (interval.start - recorder.began, interval.end - interval.start)
            )
            event = {
                "ph": "X",
                "name": interval.name,
                "cat": lane,
                "pid": pid,
                "tid": row + 1,
                "ts": start,
                "dur": duration,
            }
            events.append(event | {"args": interval.arguments})
    return events


def rows_of(intervals: Sequence[Interval], nested: bool = False) -> list[int]:
    """Returns a row for each interval, in the order of their starts: the first free one, so that no
    two overlap in a row. nested: all in the first row, because one thread's spans are nested."""
    if nested:
        return [0] * len(intervals)
    ends: list[float] = []
    rows = []
    for interval in intervals:
        row = next((r for r, end in enumerate(ends) if end <= interval.start), len(ends))
        ends[row : row + 1] = [interval.end]
        rows.append(row)
    return rows


def read(run: Path) -> dict[str, list[Interval]]:
    """Returns the spans of a run by lane, in the order of their starts, in seconds since the run
    began."""
    events = json.loads((run / FILE).read_text(encoding="utf-8"))["traceEvents"]
    found: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    for e in events:
        if e["ph"] == "X":
            found.setdefault(e["cat"], []).append(
                Interval(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"])
            )
    return found
