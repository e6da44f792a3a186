"""Follows a run's metrics.jsonl: reads each line once, also of a file that is being written."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.monitor.metrics import FILE

MOST_KEYS = 4000  # a custom loss adds metrics by name


class MetricsFile:
    """The rows of a run's metrics as columns. A damaged line is counted, and an incomplete last one
    is read once it is whole."""

    def __init__(self, run: Path) -> None:
        self.path = run / FILE
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._inode, self._at = 0, 0
        self._columns: dict[str, array[float]] = {}
        self._last: dict[str, float] = {}
        self.rows = 0
        self.damaged = 0
        self.complete = True
        """False if the time was over before the end of the file."""

    def refresh(self, until: float = math.inf) -> None:
        """Reads what was added since the last time, or everything if the file was replaced. until:
        when to stop, in seconds of time.monotonic; the next call goes on there."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    if stat.st_ino != self._inode or stat.st_size < self._at:
                        self._reset()
                        self._inode = stat.st_ino
                    file.seek(self._at)
                    self.complete = True
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        if time.monotonic() > until:
                            self.complete = False
                            break
                        self._at += len(line)
                        self._add(line)
            except FileNotFoundError:
                self._reset()

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            self.damaged += bool(line.strip())
            return
        for key, value in row.items():
            if key not in self._columns:
                if len(self._columns) >= MOST_KEYS:
                    continue
                self._columns[key] = array("d", [math.nan]) * self.rows
            is_known = isinstance(value, int | float) and math.isfinite(value)
            self._columns[key].append(value if is_known else math.nan)
            if is_known:
                self._last[key] = value
        self.rows += 1
        for column in self._columns.values():
            if len(column) < self.rows:
                column.append(math.nan)

    @property
    def keys(self) -> list[str]:
        return sorted(self._columns)

    def column(self, key: str) -> Any:
        """Returns a metric's values, NaN where a row has none; None for a metric that no row
        has."""
        found = self._columns.get(key)
        return None if found is None else np.array(found[: self.rows])

    def last(self) -> dict[str, float]:
        """Returns the newest value of each metric."""
        return dict(self._last)

    def curves(self, keys: Sequence[str], points: int) -> Mapping[str, Any]:
        """Returns each metric's course of at most `points` points: `step`, `seconds` since the run
        began, `value` (mean of the rows that a point stands for), `low` and `high`.

        `seconds` are those of the steps so far; evaluations, checkpoints and pauses between a run
        and its resumption are not in them.
        """
        with self._lock:
            steps, durations = self.column("step"), self.column("seconds")
            columns = {key: self.column(key) for key in keys}
        if steps is None:
            return {}
        elapsed = np.cumsum(np.nan_to_num(durations)) if durations is not None else 0 * steps
        return {
            key: _course(steps, elapsed, values, points)
            for key, values in columns.items()
            if values is not None
        }


def _course(steps: Any, elapsed: Any, values: Any, points: int) -> dict[str, list[float]]:
    there = np.flatnonzero(np.isfinite(values))
    if not len(there):
        return {name: [] for name in ("step", "seconds", "value", "low", "high")}
    begins = np.arange(0, len(there), -(-len(there) // points))
    ends = np.append(begins[1:], len(there))
    chosen = values[there]
    return {
        "step": steps[there[ends - 1]].tolist(),
        "seconds": elapsed[there[ends - 1]].tolist(),
        "value": (np.add.reduceat(chosen, begins) / (ends - begins)).tolist(),
        "low": np.minimum.reduceat(chosen, begins).tolist(),
        "high": np.maximum.reduceat(chosen, begins).tolist(),
    }
