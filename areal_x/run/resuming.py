"""Where a resumed run continues, and the check that its dataset and seed are still the same.

A checkpoint records its step and the identity of the task stream: the tasks, their order and the
seed. With another stream some tasks would be trained on twice and some never, so it is refused.
Everything else may change at a resume: `train.minibatches`, learning rates, the algorithm, the
backend.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_x.errors import ConfigError, UserError
from areal_x.run import checkpoint, run_dir
from areal_x.run.journal import FILE, LOCKED_SECONDS, Journal, Resumed
from areal_x.runtime.digest import dataset_digest
from areal_x.types import Task

Message = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Where a run begins or continues."""

    step: int = 0
    """The last step taken."""

    path: Path | None = None
    """The checkpoint; None at the beginning."""

    saved: Mapping[str, Any] = field(default_factory=dict)
    """The `Rollout.state` of the checkpoint."""

    def rollout(
        self,
        journal: Journal,
        task_at: Callable[[int], Task],
        groups_per_step: int,
        deterministic: bool = False,
    ) -> Resumed | None:
        """Returns where the rollout continues; None at the beginning. Episodes that the journal
        lacks are run again.

        task_at: returns the task at a position of the stream. deterministic: episodes sampled after
        the checkpoint are forgotten, because they will be sampled again, identically.
        """
        if self.path is None:
            return None
        before = self.saved["next_ticket"] if deterministic else None
        resumed = journal.resumed(self.step, task_at, groups_per_step, before, self.saved)
        return replace(resumed, workflow=self.saved.get("workflow")) if resumed else None


BEGINNING = Start()
AUTO = "auto"


def resume_if_begun(
    runs: Path, name: str | None, steps: int, message: Message = print
) -> bool | None:
    """Decides how a run continues that a scheduler starts again and again: True from its newest
    checkpoint, False from the beginning, None if it has taken all of its steps. A run that ended
    before its first checkpoint is set aside and begins again.

    Raises: ConfigError for a run without a name, UserError if another process writes to it.
    """
    if name is None:
        raise ConfigError("train.name", None, "a name, by which a restarted run is found")
    run_dir.check_name(runs, None, resume=False)
    run = runs / name
    saved = checkpoint.steps(run)
    if (
        saved
        and saved[-1] >= steps
        and not checkpoint.find_damage(run / "checkpoints" / str(saved[-1]))
    ):
        message(f"{run} has finished: it has taken {saved[-1]} of {steps} steps")
        return None
    if not saved and (aside := run_dir.set_aside(run)):
        message(
            f"{run} ended before its first checkpoint and begins again; its files are now in {aside}"
        )
    return bool(saved)


def decide(resume: bool | str, runs: Path, name: str | None, steps: int) -> bool | None:
    """Returns True if a run resumes, False if it begins, None if it has finished and `resume` is
    "auto"."""
    return resume_if_begun(runs, name, steps) if resume == AUTO else bool(resume)


def check_name(runs: Path, name: str | None, resume: bool) -> str | None:
    """Returns the name of a run that is about to be opened.

    Raises: as `run_dir.check_name`, and UserError for a resumed run without a checkpoint.
    """
    name = run_dir.check_name(runs, name, resume)
    if resume and name is not None and not checkpoint.steps(runs / name):
        raise UserError(f"{runs / name} has no checkpoint to resume from")
    return name


def find_start(run: Path, dataset: Sequence[Task], seed: int, message: Message) -> Start:
    """Returns where the newest intact checkpoint continues; sets a damaged journal aside.

    Raises: UserError without a checkpoint, ConfigError if its seed or its tasks were others.
    """
    step, path, state = checkpoint.newest(run, message)
    then = state.get("drawn_from")
    now = stream_identity(dataset, seed)
    if then is not None and then["seed"] != seed:
        wanted = (
            f"{then['seed']}, with which {run} began: with another seed some tasks would be trained"
            " on twice and some never"
        )
        raise ConfigError("train.seed", seed, wanted)
    if then is not None and then != now:
        wanted = (
            f"the {then['tasks']:,} tasks of {path}, in their order: with others some would be"
            " trained on twice and some never; to train on these, start a new run with model.path ="
            f" {str(path / 'trainer')!r}"
        )
        raise ConfigError("train.dataset", f"{now['tasks']:,} tasks", wanted)
    set_aside_damaged_journal(run, message)
    return Start(step, path, state["rollout"])


def stream_identity(dataset: Sequence[Task], seed: int) -> dict[str, Any]:
    """Returns what decides the order of tasks: the seed, the number of tasks, and their digest.
    Checkpoints have it under "drawn_from"."""
    return {"seed": seed, "tasks": len(dataset), "sha256": dataset_digest(dataset)}


def set_aside_damaged_journal(run: Path, message: Message) -> None:
    """Renames a journal that is damaged or not a journal, so that the run continues from its
    checkpoint alone."""
    path = run / FILE
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(path, timeout=LOCKED_SECONDS)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            damage = "" if found == "ok" else " ".join(str(found).split())
    except sqlite3.OperationalError:  # locked or unreadable: opening it will report that
        return
    except sqlite3.DatabaseError as error:
        damage = str(error)
    if not damage:
        return
    aside = path.with_name(f"{FILE}.damaged-{1 + len(list(run.glob(f'{FILE}.damaged-*')))}")
    for suffix in ("-wal", "-shm"):  # useless without the damaged file
        path.with_name(FILE + suffix).unlink(missing_ok=True)
    path.rename(aside)
    message(
        f"the journal {path} is damaged ({damage}) and is now {aside.name}: groups that waited to be"
        " trained on are generated again"
    )
