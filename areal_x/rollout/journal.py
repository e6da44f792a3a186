"""What a run drew and consumed, durably: from it a killed run goes on having lost and repeated nothing, and runs are replayed.

    runner ──admitted, finished, given back, consumed──▶ a thread ──one transaction after the other──▶ journal.sqlite

Every call returns at once; the thread writes what was said in the order in which it was said, so that whenever the process is
killed the file holds all of it up to some moment shortly before. `flush` waits for it: a checkpoint is written only after what
it depends on.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import gin

from areal_x.errors import UserError, at_least
from areal_x.rollout.group_bytes import decode, encode
from areal_x.types import Episode, Group, Task

FILE = "journal.sqlite"
ADMITTED, FINISHED, GIVEN_BACK = "admitted", "finished", "given back"
TABLES = """
CREATE TABLE IF NOT EXISTS groups (
    ticket INTEGER PRIMARY KEY, position INTEGER, task TEXT, admitted_version INTEGER, status TEXT, content BLOB
);
CREATE TABLE IF NOT EXISTS consumed (step INTEGER, place INTEGER, ticket INTEGER, PRIMARY KEY (step, place));
CREATE INDEX IF NOT EXISTS consumed_ticket ON consumed (ticket);
"""
ADMIT = "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, NULL)"
END = "UPDATE groups SET status = ?, content = ? WHERE ticket = ?"
CONSUME = "INSERT OR REPLACE INTO consumed VALUES (?, ?, ?)"
GATHER_SECONDS = 0.25  # a transaction costs as much as writing several groups, so that what follows shortly shares it
TaskAt = Callable[[int], Task]  # the task of a position of the stream


@gin.configurable("journal")
@dataclass(frozen=True)
class JournalConfig:
    """How much of a run its journal keeps.

    keep_steps: of so many steps before the newest checkpoint the groups stay there to be looked at and replayed; what a resumed
    run needs stays in any case. 0 keeps all: 5 to 7 bytes a token.
    """

    keep_steps: int = 1000

    def __post_init__(self) -> None:
        at_least("journal.keep_steps", self.keep_steps, 0)


@dataclass(frozen=True)
class Resumed:
    """Where a rollout goes on.

    position: of the dataset's next task. next_ticket: of the next group. unfinished: the position of each ticket that is to be
    run again. finished: the groups that wait to be consumed, each with its position. order: the tickets of the next steps,
    where they are known, as a run that went on from here before consumed them. workflow: its own state, None where it has none.
    """

    position: int = 0
    next_ticket: int = 0
    unfinished: Mapping[int, int] = field(default_factory=dict)
    finished: Sequence[tuple[int, Group]] = ()
    order: Sequence[Sequence[int]] = ()
    workflow: Any = None


class Recorder(Protocol):
    """What a runner tells of its groups."""

    def admitted(self, group: Group, position: int) -> None: ...

    def finished(self, group: Group) -> None: ...

    def given_back(self, group: Group) -> None: ...

    def consumed(self, step: int, groups: Sequence[Group]) -> None: ...


class Unrecorded:
    """A recorder that forgets."""

    def admitted(self, group: Group, position: int) -> None: ...

    def finished(self, group: Group) -> None: ...

    def given_back(self, group: Group) -> None: ...

    def consumed(self, step: int, groups: Sequence[Group]) -> None: ...


class Journal:
    """The journal of a run's directory, to be written and read. A context manager: leaving it writes what is left.

    Raises: UserError, from any call after it, when the file could not be written; a resumed run goes on from what is there.
    """

    def __init__(self, run: Path, keep_steps: int = 0) -> None:
        self.path, self.keep_steps = run / FILE, keep_steps
        self._said: SimpleQueue[Any] = SimpleQueue()
        self._urgent = threading.Event()
        self._error: Exception | None = None
        self._writing = self._connect(check_same_thread=False)  # the thread's
        with self._writing:
            self._writing.executescript(TABLES)
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._urgent.set()
        self._thread.join()

    # ---- what a run says

    def admitted(self, group: Group, position: int) -> None:
        """The group took a slot for the task at this position of the stream, the first time or again."""
        self._say(ADMIT, (group.ticket, position, group.task.id, group.admitted_version, ADMITTED))

    def finished(self, group: Group) -> None:
        """The group waits to be consumed."""
        self._say(END, (FINISHED, group, group.ticket))

    def given_back(self, group: Group) -> None:
        """The group is not trained on. Its outcomes are kept, its tokens are not."""
        outcomes = tuple(Episode(episode.outcome) for episode in group.episodes)
        self._say(END, (GIVEN_BACK, Group(group.task, group.ticket, group.admitted_version, outcomes), group.ticket))

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """The step that makes this version trains on these groups, in this order."""
        for place, group in enumerate(groups):
            self._say(CONSUME, (step, place, group.ticket))

    def prune(self, oldest_checkpoint: int, step: int) -> None:
        """Forgets the groups that `keep_steps` before `step`, and a run resumed from the oldest checkpoint, do without."""
        if self.keep_steps:
            last = min(oldest_checkpoint, step - self.keep_steps)
            # The newest ticket stays: it tells where tickets and positions go on.
            self._say(
                "DELETE FROM groups WHERE ticket < (SELECT max(ticket) FROM groups) AND ("
                "ticket IN (SELECT ticket FROM consumed WHERE step <= ?) OR "
                "status = ? AND ticket < (SELECT max(ticket) FROM consumed WHERE step <= ?))",
                (last, GIVEN_BACK, last),
            )
            self._say("DELETE FROM consumed WHERE step <= ?", (last,))

    def flush(self) -> None:
        """Returns when all that was said is in the file."""
        written = threading.Event()
        self._said.put(written)
        self._urgent.set()
        written.wait()
        self._check()

    # ---- what it tells

    def resumed(self, step: int, task_at: TaskAt, groups_per_step: int, before: int | None = None) -> Resumed | None:
        """Where the rollout goes on from the checkpoint of `step`; None where nothing was recorded.

        task_at: gives the task of a position. What was consumed after the checkpoint is consumed again, in the same order, as
        long as steps are of the same size. before: forgets tickets from this one on, and so where they were consumed.
        """
        with self._open() as connection:
            if before is not None:
                connection.execute("DELETE FROM groups WHERE ticket >= ?", (before,))
                connection.execute("DELETE FROM consumed WHERE step > ?", (step,))
            newest, position = connection.execute("SELECT max(ticket), max(position) FROM groups").fetchone()
            live = connection.execute(
                "SELECT ticket, position, admitted_version, status, content FROM groups WHERE status != ? AND "
                "ticket NOT IN (SELECT ticket FROM consumed WHERE step <= ?) ORDER BY ticket",
                (GIVEN_BACK, step),
            ).fetchall()
            later = connection.execute("SELECT step, ticket FROM consumed WHERE step > ? ORDER BY step, place", (step,))
            order = [[ticket for _, ticket in tickets] for _, tickets in groupby(later, key=itemgetter(0))]
            # A step that a kill cut in two was not consumed.
            while order and len(order[-1]) != groups_per_step:
                order.pop()
            there = {ticket for ticket, _, _, status, _ in live if status == FINISHED}
            if any(len(tickets) != groups_per_step or not there.issuperset(tickets) for tickets in order):
                order = []
            connection.execute("DELETE FROM consumed WHERE step > ?", (step + len(order),))
        if newest is None:
            return None
        finished = [
            (position, decode(content, task_at(position), ticket, version))
            for ticket, position, version, status, content in live
            if status == FINISHED
        ]
        return Resumed(
            position=1 + position,
            next_ticket=1 + newest,
            unfinished={ticket: position for ticket, position, _, status, _ in live if status == ADMITTED},
            finished=finished,
            order=order,
        )

    def steps(self) -> list[int]:
        """The steps whose groups are all there, rising."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT step FROM consumed LEFT JOIN groups USING (ticket) GROUP BY step HAVING count(content) = count(*) "
                "ORDER BY step"
            )
            return [step for (step,) in found]

    def groups_of(self, step: int, task_at: TaskAt | None = None) -> list[Group]:
        """The groups that a step consumed, in its order. task_at: gives the task of a position; without it a task has an id
        and nothing else."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT ticket, position, task, admitted_version, content FROM consumed JOIN groups USING (ticket) "
                "WHERE step = ? ORDER BY place",
                (step,),
            ).fetchall()
        return [
            decode(content, Task(name, "") if task_at is None else task_at(position), ticket, version)
            for ticket, position, name, version, content in found
        ]

    def to_pandas(self) -> Any:
        """One row a trajectory of what was finished, a row without tokens for an episode that was not scored: which step
        consumed it (NaN: none yet), its task, outcome, reward, versions and arrays."""
        import pandas

        with self._open() as connection:
            found = connection.execute(
                "SELECT step, ticket, position, task, admitted_version, status, content FROM groups LEFT JOIN consumed "
                "USING (ticket) WHERE content IS NOT NULL ORDER BY ticket"
            ).fetchall()
        return pandas.DataFrame([row for entry in found for row in table_rows(*entry)])

    # ---- the file

    def _connect(self, **how: Any) -> sqlite3.Connection:
        try:
            connection: sqlite3.Connection = sqlite3.connect(self.path, **how)
            # Readers do not wait for the writer, and a commit is one append. Where the file system cannot, the default stays.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            raise UserError(f"the journal {self.path} cannot be opened ({error}): move it away to go on without it") from error
        return connection

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection to look with, whose changes are kept where the body ends well."""
        with closing(self._connect()) as connection, connection:
            yield connection

    def _say(self, statement: str, values: tuple[Any, ...]) -> None:
        self._check()
        self._said.put((statement, values))

    def _check(self) -> None:
        if self._error is not None:
            raise UserError(
                f"the journal {self.path} could not be written ({self._error}): make room and go on with --resume"
            ) from self._error

    def _write(self) -> None:
        ended = False
        while not ended:
            said = [self._said.get()]
            self._urgent.wait(GATHER_SECONDS)
            self._urgent.clear()
            while not self._said.empty():
                said.append(self._said.get())
            ended = None in said
            try:
                with self._writing:  # one transaction
                    for statement, values in (entry for entry in said if isinstance(entry, tuple)):
                        self._writing.execute(statement, [encode(x) if isinstance(x, Group) else x for x in values])
            except Exception as error:
                self._error = self._error or error
            for entry in said:
                if isinstance(entry, threading.Event):
                    entry.set()
        self._writing.close()


def table_rows(
    step: int | None, ticket: int, position: int, task: str, version: int, status: str, content: bytes
) -> Iterator[dict[str, Any]]:
    """The rows of `Journal.to_pandas` of one group."""
    group = decode(content, Task(task, ""), ticket, version)
    whose = {"step": step, "ticket": ticket, "position": position, "task": task, "admitted_version": version, "status": status}
    for number, episode in enumerate(group.episodes):
        outcome = episode.outcome
        row = {**whose, "episode": number, "outcome": type(outcome).__name__, "reward": getattr(outcome, "reward", None)}
        row |= {"error": getattr(outcome, "error", None), "details": getattr(outcome, "details", None)}
        for t in episode.trajectories or (None,):
            arrays = {} if t is None else {name: getattr(t, name) for name in ("tokens", "mask", "logprobs", "versions")}
            yield row | ({} if t is None else {"length": len(t), "finish_reason": t.finish_reason, **arrays})
