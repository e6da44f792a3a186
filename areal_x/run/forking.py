"""A second run that continues from a checkpoint of another, beside it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from areal_x.errors import UserError
from areal_x.run import checkpoint
from areal_x.run.group_bytes import decode
from areal_x.run.journal import ADMITTED, FILE, LOCKED_SECONDS
from areal_x.run.retries import METRICS
from areal_x.run.run_dir import CONFIG
from areal_x.types import NOT_THE_POLICY, Task


def fork_run(run: Path | str, name: str, step: int | None = None) -> Path:
    """Copies what a run needs to continue into a new run beside it, which `--resume`, or
    `experiment.open(resume=True, name=NAME)`, then continues: with its own settings or with others.
    The run that is copied does not change, and may go on.

    The fork's journal is that of the checkpoint: groups admitted later are left out, and those with
    tokens of later policies, which the fork never had, are sampled again. Checkpoints are linked, not
    copied, where the file system allows it.

    Args:
        run: The run's directory.
        name: The fork's name, in the same folder.
        step: The checkpoint; by default the newest.

    Returns: the fork's directory.

    Raises: UserError for a name that is taken, a checkpoint that is not there or is damaged.
    """
    run = Path(run)
    fork = run.parent / name
    saved = checkpoint.steps(run)
    if not saved or (step is not None and step not in saved):
        there = ", ".join(map(str, saved)) or "none"
        raise UserError(f"{run} has no checkpoint{f' of step {step}' if step else ''}: {there}")
    step = saved[-1] if step is None else step
    place = Path("checkpoints", str(step))
    if damage := checkpoint.find_damage(run / place):
        raise UserError(f"the checkpoint {run / place} is damaged ({damage})")
    if Path(name).name != name or fork.exists():
        raise UserError(f"the run {fork} cannot be created: choose a name that no run has")
    unfinished = Path(tempfile.mkdtemp(dir=run.parent, prefix=f".{name}."))
    try:
        shutil.copytree(run / place, unfinished / place, copy_function=_link)
        for file in (CONFIG, METRICS):
            if (run / file).is_file():
                shutil.copyfile(run / file, unfinished / file)
        if (run / FILE).is_file():
            state = json.loads((run / place / checkpoint.STATE).read_text(encoding="utf-8"))
            copy_journal(run / FILE, unfinished / FILE, step, state["rollout"]["next_ticket"])
        unfinished.chmod(run.stat().st_mode)
        unfinished.rename(fork)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return fork


def _link(source: str, target: str) -> None:
    """A checkpoint's files never change, so that two runs may share them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_journal(source: Path, target: Path, step: int, next_ticket: int) -> None:
    """Copies what a journal had at a step, also that of a run that goes on: whole transactions."""
    with (
        closing(sqlite3.connect(source, timeout=LOCKED_SECONDS)) as original,
        closing(sqlite3.connect(target)) as copied,
    ):
        original.backup(copied)
        copied.execute("DELETE FROM groups WHERE ticket >= ?", (next_ticket,))
        copied.execute("DELETE FROM consumed WHERE step > ?", (step,))
        copied.execute("DELETE FROM trained WHERE step > ?", (step,))
        waiting = copied.execute(
            "SELECT ticket, content FROM groups WHERE content IS NOT NULL"
            " AND ticket NOT IN (SELECT ticket FROM consumed)"
        ).fetchall()
        for ticket, content in waiting:
            if newest_version(content) > step:
                copied.execute(
                    "UPDATE groups SET status = ?, content = NULL WHERE ticket = ?",
                    (ADMITTED, ticket),
                )
        copied.commit()


def newest_version(content: bytes) -> int:
    """Returns the newest policy version among the tokens of a recorded group."""
    group = decode(content, Task("", ""), 0, 0)
    trajectories = [t for episode in group.episodes for t in episode.trajectories]
    return max((int(t.versions.max(initial=NOT_THE_POLICY)) for t in trajectories), default=-1)
