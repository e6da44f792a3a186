"""Commands that `ray job submit` runs."""

from __future__ import annotations

from pathlib import Path

from areal_x.errors import ConfigError

COPIES = "working_dir_files"  # where Ray keeps the copies of --working-dir


def check_runs(runs: Path, folder: Path) -> None:
    """Raises: ConfigError for a relative folder of runs below a copy of the working directory, which
    Ray deletes after the job. folder: in which the command runs."""
    if not runs.is_absolute() and COPIES in folder.parts:
        wanted = (
            "an absolute path on all nodes, because `ray job submit --working-dir` runs the command"
            " in a copy of the folder, which is deleted after the job"
        )
        raise ConfigError("train.runs", str(runs), wanted)
