"""Writes and reads a run's metrics: one row a step, in metrics.jsonl, TensorBoard and the configured
trackers.

A row is a plain dict of numbers, as areal_x.monitor.step_metrics computes them; all keys but `step`
are plotted. docs/metrics.md lists the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_x.errors import UserError
from areal_x.monitor.tensorboard import ScalarWriter
from areal_x.monitor.trackers import Tracker
from areal_x.run.checkpoint import is_disk_full

FILE = "metrics.jsonl"

Row = Mapping[str, float]


class MetricsWriter:
    """Writes each row immediately, so that a killed run has all its steps. Close it, or use it in a
    `with`.

    trackers: in addition to metrics.jsonl and TensorBoard, which are always written; closed with
    the writer. resumed_at: the step of the checkpoint from which the run resumes; later rows are
    removed, so that no step is there twice.
    """

    def __init__(
        self, run: Path, trackers: Iterable[Tracker] = (), resumed_at: int | None = None
    ) -> None:
        self.path = run / FILE
        if resumed_at is not None:
            remove_after(run, resumed_at)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = ScalarWriter(run / "tensorboard", resumed_at)
        self._trackers = list(trackers)

    def write(self, row: Row) -> None:
        """Writes one step's metrics. Raises: UserError if the disk is full."""
        step = int(row["step"])
        plotted = {
            key: float(value) for key, value in row.items() if key != "step" and value is not None
        }
        try:
            self._file.write(to_json(row) + "\n")
            self._file.flush()
            self._tensorboard.write(plotted, step)
        except OSError as error:
            if is_disk_full(error):
                raise UserError(
                    f"the disk of {self.path} is full: make room and continue with --resume"
                ) from error
            raise
        for tracker in self._trackers:
            tracker.log(plotted, step=step)

    def close(self) -> None:
        # Each row was flushed: only one that could not be written is left, and that was reported.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._tensorboard.close()
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def to_json(row: Row) -> str:
    """One line of JSON. Numbers that JSON does not have (NaN, infinities) become null."""
    return json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False)


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run, in order. An incomplete last line, left by a crash, is ignored.

    Raises: UserError for any other line that is not a row, with its place.
    """
    path = run / FILE
    if not path.exists():
        return []
    if not path.is_file():
        raise UserError(f"{path} is not a file: move it away and try again")
    lines = path.read_bytes().split(b"\n")
    return [
        _row(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1) if line
    ]


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # invalid JSON or UTF-8
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise UserError(
            f"{place} is damaged: it is not a row of metrics; delete that line and try again"
        )
    return row


def remove_after(run: Path, step: int) -> None:
    """Removes the rows after `step`, of steps that a resumed run takes again."""
    kept = [row for row in read(run) if row["step"] <= step]
    rewritten = run / (FILE + ".new")
    rewritten.write_text("".join(to_json(row) + "\n" for row in kept), encoding="utf-8")
    rewritten.replace(run / FILE)


def _plain(value: Any) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
