"""Where a resumed run goes on, and whether it is the run that began.

A checkpoint counts steps and holds what they were drawn from. What decides which task is drawn when
(the tasks, their order, the seed) must be as it was: with anything else a task would be trained on
twice, or never. Everything else may change at a resume: `train.minibatches`, learning rates, the
algorithm, the backend.
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

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on. step: that was taken last. path: the checkpoint, None at the
    beginning. saved: what `Rollout.state` gave then."""

    step: int = 0
    path: Path | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)

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


def automatic(runs: Path, name: str | None, steps: int, say: Say = print) -> bool | None:
    """What a run that a scheduler starts again and again has to do: True to go on with its newest
    checkpoint, False to begin, None where it has taken all of its steps. What ended before its
    first checkpoint is put aside and begun again.

    Raises: ConfigError for a run without a name, UserError where another process writes to it.
    """
    if name is None:
        raise ConfigError(
            "train.name", None, "a name, by which a run that is started again is found"
        )
    run_dir.check(runs, None, resume=False)
    run = runs / name
    saved = checkpoint.steps(run)
    if (
        saved
        and saved[-1] >= steps
        and not checkpoint.find_damage(run / "checkpoints" / str(saved[-1]))
    ):
        say(f"{run} has finished: it has taken {saved[-1]} of {steps} steps")
        return None
    if not saved and (aside := run_dir.put_aside(run)):
        say(
            f"{run} ended before its first checkpoint and begins again; what there was of it is now"
            f" {aside}"
        )
    return bool(saved)


def decided(resume: bool | str, runs: Path, name: str | None, steps: int) -> bool | None:
    """Whether a run goes on; None where it has finished and `resume` is "auto"."""
    return automatic(runs, name, steps) if resume == AUTO else bool(resume)


def named(runs: Path, name: str | None, resume: bool) -> str | None:
    """The name of a run that is about to be opened. Raises: as `run_dir.check`, and UserError
    without a checkpoint."""
    name = run_dir.check(runs, name, resume)
    if resume and name is not None and not checkpoint.steps(runs / name):
        raise UserError(f"{runs / name} has no checkpoint to resume from")
    return name


def start(run: Path, dataset: Sequence[Task], seed: int, say: Say) -> Start:
    """Where the newest whole checkpoint goes on; a damaged journal is set aside.

    Raises: UserError without a checkpoint, ConfigError for another seed or other tasks than those
    that it was drawn from.
    """
    step, path, state = checkpoint.newest(run, say)
    then, now = state.get("drawn_from"), drawn_from(dataset, seed)
    if then is not None and then["seed"] != seed:
        wanted = (
            f"{then['seed']}, with which {run} drew its tasks: another seed would draw some twice"
            " and some never"
        )
        raise ConfigError("train.seed", seed, wanted)
    if then is not None and then != now:
        wanted = (
            f"the {then['tasks']:,} tasks of {path}, in their order: with others some would be"
            " drawn twice and some never; to train on these, begin a new run with model.path ="
            f" {str(path / 'trainer')!r}"
        )
        raise ConfigError("train.dataset", f"{now['tasks']:,} tasks", wanted)
    set_aside_if_damaged(run, say)
    return Start(step, path, state["rollout"])


def drawn_from(dataset: Sequence[Task], seed: int) -> dict[str, Any]:
    """What decides which task is drawn when: the seed, how many tasks there are, and a digest of
    them."""
    return {"seed": seed, "tasks": len(dataset), "sha256": dataset_digest(dataset)}


def set_aside_if_damaged(run: Path, say: Say) -> None:
    """Renames a journal that is none, or is damaged, so that the run goes on with its checkpoint
    alone."""
    path = run / FILE
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(path, timeout=LOCKED_SECONDS)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            damage = "" if found == "ok" else " ".join(str(found).split())
    except sqlite3.OperationalError:  # locked, or not to be read: for whoever opens it to say
        return
    except sqlite3.DatabaseError as error:
        damage = str(error)
    if not damage:
        return
    aside = path.with_name(f"{FILE}.damaged-{1 + len(list(run.glob(f'{FILE}.damaged-*')))}")
    for end in ("-wal", "-shm"):  # of the damaged file alone
        path.with_name(FILE + end).unlink(missing_ok=True)
    path.rename(aside)
    say(
        f"the journal {path} is damaged ({damage}) and is now {aside.name}: what waited to be"
        " trained on is generated again"
    )
