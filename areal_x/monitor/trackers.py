"""wandb and trackio, where a run's rows are shown to others, with the settings that the run has.

A run is known there by its name and a few random letters, which its directory keeps: a run that is
resumed, or moved, goes on as the same, and one of that name on another machine is another.
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
LONGEST_NAME = 100  # characters: wandb takes ids of 128


class Tracker(Protocol):
    def log(self, row: Mapping[str, float], step: int) -> None:
        """The numbers of a step; of one that is taken again after a resume, the newer beside the
        older."""
        ...

    def finish(self) -> None: ...


def check_loggers(loggers: Sequence[str]) -> None:
    """Raises: ConfigError for a name that is not one of ours, UserError for one whose package is
    not installed."""
    for name in loggers:
        one_of("train.loggers", name, TRACKERS)
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.loggers asks for {name}, which is not installed: pip install {name}"
            )


def start(name: str, run: Path, project: str, settings: Mapping[str, Any]) -> Tracker:
    """The run in the project, begun or gone on with. settings: what is shown as its
    configuration."""
    return Wandb(run, project, settings) if name == "wandb" else Trackio(run, project, settings)


class Wandb:
    """Steps are an axis of their own: wandb's own counter refuses those that a resumed run takes
    again."""

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
    """It knows a run of a project by its name alone."""

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
    """By which no other run anywhere is known; made once and kept in the run's directory."""
    file = run / ID
    if not file.is_file():
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.name)[:LONGEST_NAME]
        file.write_text(f"{name}-{secrets.token_hex(4)}", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
