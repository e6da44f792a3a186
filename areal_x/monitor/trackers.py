"""Logs a run's metrics and settings to wandb and trackio.

A run is identified there by its name and a few random letters, which are stored in its directory: a
run that is resumed or moved stays the same, and one with that name on another machine is another.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_x.errors import UserError, one_of

TRACKERS, PROJECT = ("wandb", "trackio"), "areal-x"
ID = "tracker_id"  # the file in the run's directory
MAX_NAME = 100  # characters: wandb accepts ids of up to 128


class Tracker(Protocol):
    def log(self, row: Mapping[str, float], step: int) -> None:
        """Logs a step's metrics. A step that is taken again after a resume is logged a second
        time."""
        ...

    def finish(self) -> None: ...


def check_loggers(loggers: Sequence[str]) -> None:
    """Raises: ConfigError for an unknown name, UserError for a tracker whose package is not
    installed."""
    for name in loggers:
        one_of("train.loggers", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.loggers asks for {name}, which is not installed: pip install {name}"
            )


def start(name: str, run: Path, project: str, settings: Mapping[str, Any]) -> Tracker:
    """Starts or resumes the run in the project. settings: shown there as its configuration."""
    return Wandb(run, project, settings) if name == "wandb" else Trackio(run, project, settings)


class Wandb:
    """Logs steps as an axis of their own, because wandb's own counter rejects steps that a resumed
    run takes again."""

    def __init__(self, run: Path, project: str, settings: Mapping[str, Any]) -> None:
        init: Any = importlib.import_module("wandb").init
        self._run = init(
            project=project,
            name=run.name,
            id=unique_id(run),
            dir=str(run),
            resume="allow",
            config=dict(settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log({**row, "step": step})

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio identifies a run of a project by its name alone, so the unique id is its name."""

    def __init__(self, run: Path, project: str, settings: Mapping[str, Any]) -> None:
        init: Any = importlib.import_module("trackio").init
        self._run = init(
            project=project, name=unique_id(run), resume="allow", config=dict(settings)
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def finish(self) -> None:
        self._run.finish()


def unique_id(run: Path) -> str:
    """A globally unique id of the run, made once and stored in the run's directory."""
    file = run / ID
    if not file.is_file():
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.name)[:MAX_NAME]
        file.write_text(f"{name}-{secrets.token_hex(4)}", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
