"""A command that trains on a cluster, watched from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_x.monitor.metrics import read
from tests.launching import Process


@dataclass
class Watched:
    """The command that tests.launching has started in a folder. seconds: that a condition may take."""

    process: Process
    folder: Path
    seconds: float = 300

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def rows(self) -> list[dict[str, float]]:
        """The metrics of the steps that it has recorded."""
        return read(self.run) if (self.run / "metrics.jsonl").exists() else []

    def step(self) -> int:
        """The last step that it has recorded; -1 before the first."""
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else -1

    def out(self) -> str:
        return (self.folder / "out-0").read_text()

    def until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition, before the command ends."""
        end = time.monotonic() + self.seconds
        while not condition():
            assert self.process.poll() is None, self.errors()
            assert time.monotonic() < end, self.out()
            time.sleep(0.1)

    def succeeds(self, seconds: float) -> None:
        """Waits for its end."""
        assert self.process.wait(timeout=seconds) == 0, self.errors()

    def errors(self) -> str:
        return (self.folder / "err-0").read_text()

    def actor(self, log: str) -> psutil.Process:
        """The process of Ray's that writes this file of the run's logs."""
        file = str(self.run / "logs" / log)
        (found,) = (process for process in psutil.process_iter() if file in opened(process))
        return found


def opened(process: psutil.Process) -> set[str]:
    """The files that a process of Ray's has open."""
    try:
        return {file.path for file in process.open_files()} if "ray::" in " ".join(process.cmdline()) else set()
    except psutil.Error:
        return set()


def servers_left(model: Path) -> list[psutil.Process]:
    """The processes of vLLM servers of this model."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(model) in " ".join(p.info["cmdline"] or ())]
