"""What a run measured: one row a step, in metrics.jsonl, TensorBoard and whichever trackers are asked for.

A row is a plain dict of numbers; `step` and `version` count, everything else is plotted. docs/metrics.md lists the keys.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_x.checkpoint import is_disk_full
from areal_x.errors import UserError, one_of
from areal_x.monitor.tensorboard import ScalarWriter

FILE = "metrics.jsonl"
PROJECT = "areal-x"
TRACKERS = ("wandb", "trackio")

Row = Mapping[str, float]


def check_loggers(loggers: Sequence[str]) -> None:
    """Raises: ConfigError for a name that is not one of ours, UserError for one whose package is not installed."""
    for name in loggers:
        one_of("train.loggers", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"train.loggers asks for {name}, which is not installed: pip install {name}")


class MetricsWriter:
    """Writes each row at once, so that a killed run has all its steps. Close it, or use it in a `with`.

    loggers: "wandb" and "trackio" beside metrics.jsonl and TensorBoard, which are always written.
    resumed_at: the step of the checkpoint that is gone on from; rows after it are cut, so that no step is there twice.
    """

    def __init__(self, run: Path, loggers: Sequence[str] = (), resumed_at: int | None = None) -> None:
        check_loggers(loggers)
        self.path = run / FILE
        if resumed_at is not None:
            cut(run, resumed_at)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = ScalarWriter(run / "tensorboard", resumed_at)
        self._trackers = [_start(name, run) for name in TRACKERS if name in loggers]

    def write(self, row: Row) -> None:
        """One step's numbers. Raises: UserError when the disk is full."""
        step = int(row["step"])
        plotted = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
        try:
            self._file.write(to_json(row) + "\n")
            self._file.flush()
            self._tensorboard.write(plotted, step)
        except OSError as error:
            if is_disk_full(error):
                raise UserError(f"the disk of {self.path} is full: make room and continue with --resume") from error
            raise
        for tracker in self._trackers:
            tracker.log(plotted, step=step)

    def close(self) -> None:
        with suppress(OSError):  # each row was flushed: only one that was refused can be left to write, and that was told
            self._file.close()
        with suppress(OSError):
            self._tensorboard.close()
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def to_json(row: Row) -> str:
    """One line of JSON. What JSON has no number for (NaN, infinities) is null."""
    return json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False)


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run, in order; a last line that a crash left half written is not one."""
    path = run / FILE
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def cut(run: Path, step: int) -> None:
    """Forgets the rows after `step`: what was measured there belongs to steps that are taken again."""
    kept = [row for row in read(run) if row["step"] <= step]
    rewritten = run / (FILE + ".new")
    rewritten.write_text("".join(to_json(row) + "\n" for row in kept), encoding="utf-8")
    rewritten.replace(run / FILE)


def _start(name: str, run: Path) -> Any:
    """A tracker's run, with `log` and `finish`. The run's name joins the parts of a resumed run."""
    module = importlib.import_module(name)
    start: Callable[..., Any] = module.init
    if name == "wandb":
        return start(project=PROJECT, name=run.name, id=run.name, dir=str(run), resume="allow")
    return start(project=PROJECT, name=run.name, resume="allow")


def _plain(value: Any) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
