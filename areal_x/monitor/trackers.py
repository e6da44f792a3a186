"""Logs a run's metrics and settings to wandb, SwanLab and trackio.

A run is identified there by its name and a few random letters, which are stored in its directory: a
run that is resumed or moved stays the same, and one with that name on another machine is another.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gin

from areal_x.errors import ConfigError, UserError, one_of
from areal_x.run import checkpoint, run_dir

TRACKERS, PROJECT = ("wandb", "swanlab", "trackio"), "areal-x"
ID = "tracker_id"  # the file in the run's directory
MAX_NAME = 100  # characters: wandb accepts ids of up to 128
MODES = ("online", "offline", "disabled")
ARTIFACTS = ("files", "model")
FILES = (run_dir.CONFIG, "metrics.jsonl", "timeline.json", "plot.png")
WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # of a model's directory


@gin.configurable("tracking")
@dataclass(frozen=True)
class TrackingConfig:
    """How train.loggers show the run."""

    entity: str | None = None
    """wandb's entity or SwanLab's workspace: the user or team that owns the project; None is the
    user's default."""

    run_group: str | None = None
    """Group of runs that this one belongs to."""

    tags: tuple[str, ...] = ()
    """Tags of the run. Not with trackio alone."""

    mode: str | None = None
    """"online", "offline" (files in the run's directory, which `wandb sync` or `swanlab sync`
    uploads) or "disabled"; None leaves it to WANDB_MODE or SWANLAB_MODE. Not with trackio alone."""

    artifacts: tuple[str, ...] = ()
    """What wandb stores of the run at its end: "files" (settings, metrics, timeline, plot) and "model"
    (the newest checkpoint's model without the optimizer's state)."""

    def check(self, loggers: Sequence[str]) -> None:
        """Raises: ConfigError for a setting that none of the loggers reads."""
        if self.mode is not None:
            one_of("tracking.mode", self.mode, MODES)
        for name in self.artifacts:
            one_of("tracking.artifacts", name, ARTIFACTS)
        readers = {
            "entity": ("wandb", "swanlab"),
            "run_group": TRACKERS,
            "tags": ("wandb", "swanlab"),
            "mode": ("wandb", "swanlab"),
            "artifacts": ("wandb",),
        }
        for name, by in readers.items():
            value = getattr(self, name)
            if value and not set(loggers) & set(by):
                wanted = f"left out, or train.loggers must have {' or '.join(map(repr, by))}"
                raise ConfigError(f"tracking.{name}", value, wanted)


NO_TRACKING = TrackingConfig()


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


def start(
    name: str,
    run: Path,
    project: str,
    settings: Mapping[str, Any],
    tracking: TrackingConfig = NO_TRACKING,
) -> Tracker:
    """Starts or resumes the run in the project. settings: shown there as its configuration."""
    return STARTS[name](run, project, settings, tracking)


class Wandb:
    """Logs steps as an axis of their own, because wandb's own counter rejects steps that a resumed
    run takes again."""

    def __init__(
        self, run: Path, project: str, settings: Mapping[str, Any], tracking: TrackingConfig
    ) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._directory, self._artifacts = run, tracking.artifacts
        self._run = self._wandb.init(
            project=project,
            name=run.name,
            id=unique_id(run),
            dir=str(run),
            resume="allow",
            config=dict(settings),
            entity=tracking.entity,
            group=tracking.run_group,
            tags=list(tracking.tags) or None,
            mode=tracking.mode,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log({**row, "step": step})

    def finish(self) -> None:
        if "files" in self._artifacts:
            self._store("files", [self._directory / name for name in FILES])
        saved = checkpoint.steps(self._directory)
        if "model" in self._artifacts and saved:
            model = self._directory / "checkpoints" / str(saved[-1]) / "trainer"
            found = [file for pattern in WEIGHTS for file in sorted(model.glob(pattern))]
            self._store("model", found, step=saved[-1])
        self._run.finish()

    def _store(self, kind: str, files: Sequence[Path], **metadata: Any) -> None:
        """Stores those of the files that exist as an artifact of the run."""
        artifact = self._wandb.Artifact(
            f"{unique_id(self._directory)}-{kind}", kind, None, metadata
        )
        for file in files:
            if file.is_file():
                artifact.add_file(str(file), file.name)
        self._run.log_artifact(artifact)


class SwanLab:
    """Keeps the files of its offline mode in the run's directory."""

    def __init__(
        self, run: Path, project: str, settings: Mapping[str, Any], tracking: TrackingConfig
    ) -> None:
        init: Any = importlib.import_module("swanlab").init
        self._run = init(
            project=project,
            name=run.name,
            id=unique_id(run),
            log_dir=str(run / "swanlog"),
            resume="allow",
            config=dict(settings),
            workspace=tracking.entity,
            group=tracking.run_group,
            tags=list(tracking.tags) or None,
            mode=tracking.mode,
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio identifies a run of a project by its name alone, so the unique id is its name."""

    def __init__(
        self, run: Path, project: str, settings: Mapping[str, Any], tracking: TrackingConfig
    ) -> None:
        init: Any = importlib.import_module("trackio").init
        given = {"group": tracking.run_group} if tracking.run_group else {}
        self._run = init(
            project=project, name=unique_id(run), resume="allow", config=dict(settings), **given
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def finish(self) -> None:
        self._run.finish()


STARTS: dict[str, Callable[[Path, str, Mapping[str, Any], TrackingConfig], Tracker]] = {
    "wandb": Wandb,
    "swanlab": SwanLab,
    "trackio": Trackio,
}


def unique_id(run: Path) -> str:
    """A globally unique id of the run, made once and stored in the run's directory."""
    file = run / ID
    if not file.is_file():
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", run.name)[:MAX_NAME]
        file.write_text(f"{name}-{secrets.token_hex(4)}", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
