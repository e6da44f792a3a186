"""The share of time in which each part of a run was busy, from its timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_x.lab.time_parts import TimeParts, covered, time_parts
from areal_x.runtime import timeline

MOST_BYTES = 64 << 20  # of a timeline that is read: the recorder keeps 20,000 spans a lane
WAITING = ("wait",)  # spans in which a lane's part does nothing


class BusyShares:
    """What a timeline tells of where time went, read again whenever it was written."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._read: tuple[Any, dict[str, Any] | None, TimeParts | None] = (None, None, None)

    def read(self, drains: bool = False) -> tuple[dict[str, Any] | None, TimeParts | None]:
        """Returns how busy each lane was, and where the time of steps went (see `time_parts`); None
        for what the timeline, or its absence, does not tell.

        The first is `seconds`, the time that the timeline covers, and by `lanes` the share of it in
        which at least one span was open, waits left out, with the lane's own spans by name."""
        try:
            stat = (self.run / timeline.FILE).stat()
            seen = stat.st_mtime_ns, drains
            if seen != self._read[0] and stat.st_size <= MOST_BYTES:
                lanes = timeline.read(self.run)
                self._read = seen, shares(lanes), time_parts(lanes, drains)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, None
        return self._read[1:]


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
