"""The share of time in which each part of a run was busy, from its timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_x.runtime import timeline

MOST_BYTES = 64 << 20  # of a timeline that is read: the recorder keeps 20,000 spans a lane
WAITING = ("wait",)  # spans in which a lane's part does nothing


class BusyShares:
    """The shares, read again whenever the timeline was written."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._read: tuple[int, dict[str, Any] | None] = (0, None)

    def read(self) -> dict[str, Any] | None:
        """Returns `seconds`, the time that the timeline covers, and by `lanes` the share of it in
        which at least one span was open, waits left out, with the lane's own spans by name; None
        without a timeline that can be read."""
        try:
            stat = (self.run / timeline.FILE).stat()
            if stat.st_mtime_ns != self._read[0] and stat.st_size <= MOST_BYTES:
                found = shares(timeline.read(self.run))
                self._read = (stat.st_mtime_ns, found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return self._read[1]


def shares(lanes: Mapping[str, Sequence[timeline.Interval]]) -> dict[str, Any] | None:
    """Returns the shares of a timeline's lanes, see `BusyShares.read`."""
    every = [interval for intervals in lanes.values() for interval in intervals]
    if not every:
        return None
    whole = max(max(i.end for i in every) - min(i.start for i in every), 1e-9)
    found = {}
    for lane, intervals in lanes.items():
        named: dict[str, list[tuple[float, float]]] = {}
        for interval in intervals:
            named.setdefault(interval.name, []).append((interval.start, interval.end))
        working = [span for name, spans in named.items() if name not in WAITING for span in spans]
        found[lane] = {
            "share": covered(working) / whole,
            "spans": {name: covered(spans) / whole for name, spans in named.items()},
        }
    return {"seconds": whole, "lanes": found}


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
