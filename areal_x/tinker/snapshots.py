"""Snapshots of models under training, on which a restarted server repeats the requests since.

A snapshot is a model's state (`Trainer.save`) after one of its requests, in its directory. It is
taken after an optimizer step, when no gradient is pending, as soon as the work since the last one
costs much more than it did: so snapshots cost at most a twentieth of the time, and a restart repeats
at most 5 seconds of a model's work or 20 times what a snapshot of it costs, whichever is longer.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from areal_x.run.checkpoint import flush_directory
from areal_x.runtime.thread import OneThread
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.journal import Journal
from areal_x.tinker.models import Model

LEAST_SECONDS = 5.0
RATIO = 20.0
LEAST_BYTES = 256 << 20


@dataclass(eq=False)
class Snapshots:
    """The snapshots of one model, the last of which counts."""

    model: Model
    number: int = -1
    """The last request in the last snapshot; -1 without one."""

    seconds: float = 0.0
    """The trainer's time since then."""

    bytes: int = 0
    """Bodies in the journal since then."""

    stepped: bool = False
    """Whether the last request was an optimizer step."""

    cost: float = 0.0

    def place(self, number: int) -> Path:
        return self.model.directory / f"snapshot-{number}"

    def is_due(self) -> bool:
        long = self.seconds > max(LEAST_SECONDS, RATIO * self.cost)
        return self.stepped and (long or self.bytes > LEAST_BYTES)

    async def take(self, host: TrainerHost, thread: OneThread, journal: Journal, to: int) -> None:
        """Takes one with the effects of the requests up to a number; then those before it are no
        longer needed."""
        start = time.perf_counter()
        place = self.place(to)

        def write() -> None:
            host.save(self.model, place)
            flush_tree(place)

        await journal.written()  # the results of those requests
        await thread.run(write)
        journal.snapshot(self.model.id, to)
        await journal.written()
        old, self.number = self.number, to
        self.cost, self.seconds, self.bytes = time.perf_counter() - start, 0.0, 0
        if old not in (-1, to):
            shutil.rmtree(self.place(old), ignore_errors=True)


def flush_tree(directory: Path) -> None:
    """Brings a directory to the disk, safe from a power failure."""
    for place, _, files in os.walk(directory):
        for name in files:
            with Path(place, name).open("rb") as file:
                os.fsync(file.fileno())
        flush_directory(Path(place))
    flush_directory(directory.parent)
