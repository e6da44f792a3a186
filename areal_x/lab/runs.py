"""The runs of a folder: which there are, and what becomes of each, from its files alone."""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_x.config.writer import read_settings
from areal_x.lab.busy import BusyShares
from areal_x.lab.causes import LABELS, first_cause
from areal_x.lab.index import Index
from areal_x.lab.metrics_file import MetricsFile
from areal_x.lab.reading import WAL
from areal_x.lab.stall import read_stall
from areal_x.lab.vocabulary import Vocabulary, find_tokenizer
from areal_x.monitor import metrics
from areal_x.run import checkpoint, journal
from areal_x.run.run_dir import CONFIG, LOCK

FILES = (CONFIG, metrics.FILE, journal.FILE)
RECENT_SECONDS = 60.0  # in which a run whose lock is not seen has written, if it goes on
MOST_INDEXES = 4  # in memory at once
MOST_RUNS = 1000  # of a folder
SHOWN = ("reward", "accuracy", "loss", "staleness_mean", "generation_tokens_per_second")
PARTS_OF = {
    "wait_seconds": "rollout",
    "logprob_seconds": "trainer",
    "update_seconds": "trainer",
    "publish_seconds": "weights",
}
PHASES = tuple(PARTS_OF)
RUNNING, FINISHED, STOPPED, CRASHED = "running", "finished", "stopped", "crashed"


def is_run(path: Path) -> bool:
    """True for the directory of a run."""
    return any((path / name).is_file() for name in FILES)


@dataclass
class Run:
    """A run, and what was read of it."""

    path: Path

    metrics: MetricsFile = field(init=False)
    busy: BusyShares = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.path)
        self.busy = BusyShares(self.path)
        self._settings: tuple[int, dict[str, Any], str] = (0, {}, "")
        self._vocabulary: tuple[Path | None, Vocabulary | None, str] = (None, None, "")

    @property
    def name(self) -> str:
        return self.path.name

    def settings(self) -> tuple[Mapping[str, Any], str]:
        """Returns the run's bindings by name, and why they cannot be read ("" if they can)."""
        try:
            changed = (self.path / CONFIG).stat().st_mtime_ns
            if changed != self._settings[0]:
                self._settings = (changed, read_settings(self.path), "")
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            self._settings = (0, {}, f"{CONFIG} cannot be read ({error})")
        return self._settings[1:]

    def state(self) -> str:
        """Returns RUNNING, FINISHED (it took its last step), CRASHED (its process was killed: the
        journal was not closed) or STOPPED (it was interrupted, or ended by an error).

        The lock of a run on another machine or in another container is not seen here: such a run
        counts as running while its journal is open and changes at least once a minute.
        """
        if is_locked(self.path / LOCK):
            return RUNNING
        steps = self.settings()[0].get("train.steps")
        saved = checkpoint.steps(self.path)
        if isinstance(steps, int) and saved and saved[-1] >= steps:
            return FINISHED
        try:
            was_closed = not (self.path / WAL).stat().st_size
        except OSError:
            was_closed = True
        if was_closed:
            return STOPPED
        return RUNNING if time.time() - self.changed() < RECENT_SECONDS else CRASHED

    def changed(self) -> float:
        """Returns the time at which the run last wrote, in seconds since 1970; 0 if never."""
        times = []
        for name in (*FILES, WAL):
            try:
                times.append((self.path / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=0.0)

    def summary(self, until: float = math.inf) -> dict[str, Any]:
        """Returns what the list of runs shows. until: see `MetricsFile.refresh`."""
        self.metrics.refresh(until)
        settings, _ = self.settings()
        last = self.metrics.last()
        steps = settings.get("train.steps")
        return {
            "name": self.name,
            "state": self.state(),
            "changed": self.changed(),
            "complete": self.metrics.complete,
            "step": last.get("step"),
            "steps": steps if isinstance(steps, int) else None,
            "has_journal": (self.path / journal.FILE).is_file(),
            "last": {key: last[key] for key in SHOWN if key in last},
            "reward": self.metrics.curves(["reward"], 60).get("reward"),
        }

    def overview(self) -> dict[str, Any]:
        """Returns the summary, with shares of time and what was lost."""
        found = self.summary()
        last = self.metrics.last()
        total = self._total("seconds")
        phases = {key: self._total(key) / total for key in PHASES if total}
        settings, _ = self.settings()
        busy, parts = self.busy.read(drains=bool(settings.get("train.deterministic")))
        if parts is None:  # the timeline is not written yet
            shares = of_phases(phases)
            steps, seconds = last.get("step"), total
        else:
            shares, steps, seconds = parts.shares, parts.steps, parts.seconds
        cause = first_cause(shares, settings)
        found |= {
            "all": last,
            "phases": phases,
            "seconds": total,
            "busy": busy,
            "parts": {"shares": shares, "labels": LABELS, "steps": steps, "seconds": seconds},
            "stall": read_stall(self.path, found["state"] == RUNNING),
            "cause": None if cause is None else asdict(cause),
            "checkpoints": checkpoint.steps(self.path),
            "damaged_rows": self.metrics.damaged,
            "model": settings.get("model.path"),
            "algorithm": settings.get("train.algorithm"),
        }
        return found

    def _total(self, key: str) -> float:
        column = self.metrics.column(key)
        return 0.0 if column is None else float(sum(x for x in column if math.isfinite(x)))

    def vocabulary(self, given: Path | None) -> tuple[Vocabulary | None, str]:
        """Returns the tokens' texts, and why there are none ("" if there are). given: a
        tokenizer.json in place of the run's own."""
        file = given or find_tokenizer(self.path, self.settings()[0])
        if file is None:
            return None, (
                "no tokenizer.json is on this machine, in a checkpoint of the run or as model.path:"
                " start the page with --tokenizer FOLDER"
            )
        if file != self._vocabulary[0]:
            try:
                self._vocabulary = (file, Vocabulary(file), "")
            except (OSError, ValueError) as error:
                self._vocabulary = (file, None, str(error))
        return self._vocabulary[1:]


def of_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of a step's time that metrics alone tell apart."""
    found: dict[str, float] = {}
    for key, share in phases.items():
        found[PARTS_OF[key]] = found.get(PARTS_OF[key], 0.0) + share
    return found


class Runs:
    """The runs of a folder, or one run; those that begin later are found."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._runs: dict[str, Run] = {}
        self._indexes: OrderedDict[str, Index] = OrderedDict()

    def all(self) -> list[Run]:
        """Returns the runs, the one that changed last first."""
        there = {path.name: path for path in self._paths()}
        for name in self._runs.keys() - there.keys():
            del self._runs[name]
            self._indexes.pop(name, None)
        for name, path in there.items():
            if name not in self._runs:
                self._runs[name] = Run(path)
        return sorted(self._runs.values(), key=lambda run: (-run.changed(), run.name))

    def get(self, name: str) -> Run | None:
        """Returns the run of this name; None if the folder has none: no name leads elsewhere."""
        if name not in self._runs:
            self.all()
        return self._runs.get(name)

    def index(self, run: Run) -> Index:
        """Returns the index of a run's journal, empty at first: `Index.refresh` fills it. The least
        recently used ones are forgotten."""
        found = self._indexes.get(run.name)
        if found is None or found.stale:
            found = self._indexes[run.name] = Index(run.path)
        self._indexes.move_to_end(run.name)
        while len(self._indexes) > MOST_INDEXES:
            self._indexes.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the builds of indexes."""
        for index in self._indexes.values():
            index.stale = True

    def _paths(self) -> Iterator[Path]:
        if is_run(self.place):
            yield self.place
            return
        with os.scandir(self.place) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
        found = (self.place / name for name in names)
        for number, path in enumerate(path for path in found if is_run(path)):
            if number >= MOST_RUNS:
                return
            yield path


def is_locked(path: Path) -> bool:
    """True if a process that this one can see holds a run's lock. Nothing is locked to find out: a
    run that begins at that moment would take it for another process."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any(
        "FLOCK" in line and any(word.endswith(f":{inode}") for word in line.split())
        for line in locks.splitlines()
    )
