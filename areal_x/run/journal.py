"""What a run drew and consumed, durably: from it a killed run goes on having lost and repeated
nothing, and runs are replayed.

    runner ──admitted, finished, given back, consumed──▶ a thread ──one transaction after the other──▶ journal.sqlite

Every call returns at once; the thread writes the entries in their order, so that whenever the
process is killed the file holds all of them up to some moment shortly before. `flush` waits until
they are written, `sync` until they are on the disk: a checkpoint is written only after what it
depends on. Where a loss of power took the end of the journal all the same, the checkpoint's own
state stands in for it (`Journal.resumed`).
"""

from __future__ import annotations

import os
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
from areal_x.run.checkpoint import flush_directory
from areal_x.run.group_bytes import decode, encode
from areal_x.runtime import background
from areal_x.runtime.waits import waiting
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
LOCKED_SECONDS = 30.0  # that a write waits for another program which holds the file
# a transaction costs as much as writing several groups, so that what follows shortly shares it
GATHER_SECONDS = 0.25
TaskAt = Callable[[int], Task]  # the task of a position of the stream


@gin.configurable("journal")
@dataclass(frozen=True)
class JournalConfig:
    """How much of a run its journal keeps.

    keep_steps: of so many steps before the newest checkpoint the groups stay there to be looked at
    and replayed; what a resumed run needs stays in any case. 0 keeps all: 5 to 7 bytes a token.
    """

    keep_steps: int = 1000

    def __post_init__(self) -> None:
        at_least("journal.keep_steps", self.keep_steps, 0)


@dataclass(frozen=True)
class Resumed:
    """Where a rollout goes on.

    position: of the dataset's next task. next_ticket: of the next group. unfinished: the position
    of each ticket that is to be run again. finished: the groups that wait to be consumed, each with
    its position. order: the tickets of the next steps, where they are known, as a run that went on
    from here before consumed them. workflow: its own state, None where it has none.
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
    """The journal of a run's directory, to be written and read. A context manager: leaving it
    writes what is left.

    Raises: UserError for a file that is no journal; and, from any call after it, when the file
    could not be written. Nothing is written after a transaction that failed, so that the file never
    has a gap: a resumed run goes on from what is there. A journal that may only be read is read.
    """

    def __init__(self, run: Path, keep_steps: int = 0) -> None:
        self.path, self.keep_steps = run / FILE, keep_steps
        self._said: SimpleQueue[Any] = SimpleQueue()
        self._urgent = threading.Event()
        self._error: BaseException | None = None
        self._writing = self._connect()  # the thread's
        self._thread = background.thread(
            self._write, what="the journal's thread", failed=self._failed, name="journal"
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._urgent.set()
        with waiting("the run", "the journal to be closed", self._left):
            self._thread.join()

    # ---- what a run says

    def admitted(self, group: Group, position: int) -> None:
        """The group took a slot for the task at this position of the stream, the first time or
        again."""
        self._say(ADMIT, (group.ticket, position, group.task.id, group.admitted_version, ADMITTED))

    def finished(self, group: Group) -> None:
        """The group waits to be consumed."""
        self._say(END, (FINISHED, group, group.ticket))

    def given_back(self, group: Group) -> None:
        """The group is not trained on. Its outcomes are kept, its tokens are not."""
        outcomes = tuple(Episode(episode.outcome) for episode in group.episodes)
        self._say(
            END,
            (
                GIVEN_BACK,
                Group(group.task, group.ticket, group.admitted_version, outcomes),
                group.ticket,
            ),
        )

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """The step that makes this version trains on these groups, in this order."""
        for place, group in enumerate(groups):
            self._say(CONSUME, (step, place, group.ticket))

    def prune(self, oldest_checkpoint: int, step: int) -> None:
        """Forgets the groups that `keep_steps` before `step`, and a run resumed from the oldest
        checkpoint, do without."""
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
        """Returns when every entry is in the file."""
        self._wait_for(_Written(durable=False))

    def sync(self) -> None:
        """Returns when every entry is on the disk, where a loss of power leaves it."""
        self._wait_for(_Written(durable=True))

    # ---- what it tells

    def resumed(
        self,
        step: int,
        task_at: TaskAt,
        groups_per_step: int,
        before: int | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> Resumed | None:
        """Where the rollout goes on from the checkpoint of `step`; None where nothing is known.

        task_at: gives the task of a position. What was consumed after the checkpoint is consumed
        again, in the same order, as long as steps are of the same size. before: forgets tickets
        from this one on, and so where they were consumed. saved: the `Rollout.state` of the
        checkpoint, which holds where the end of the journal, or all of it, is missing: what was
        trained on by then is not trained on again, and what was drawn keeps its ticket.
        """
        if before is not None:
            self._say("DELETE FROM groups WHERE ticket >= ?", (before,))
            self._say("DELETE FROM consumed WHERE step > ?", (step,))
        self.flush()
        with self._open() as connection:
            newest, position = connection.execute(
                "SELECT max(ticket), max(position) FROM groups"
            ).fetchone()
            rows = connection.execute(
                "SELECT ticket, position, admitted_version, status, content FROM groups WHERE "
                "ticket NOT IN (SELECT ticket FROM consumed WHERE step <= ?) ORDER BY ticket",
                (step,),
            ).fetchall()
            later = connection.execute(
                "SELECT step, ticket FROM consumed WHERE step > ? ORDER BY step, place", (step,)
            )
            taken = {
                number: [ticket for _, ticket in tickets]
                for number, tickets in groupby(later, key=itemgetter(0))
            }
        if newest is None and saved is None:
            return None
        next_ticket, next_position = (0, 0) if newest is None else (1 + newest, 1 + position)
        unfinished: dict[int, int] = {}
        if saved is not None:
            waiting, drawn, drawn_to = (
                dict(saved["unfinished"]),
                saved["next_ticket"],
                saved["position"],
            )
            recorded = {ticket: position for ticket, position, *_ in rows}
            # A journal that lost its end once, and went on after a later checkpoint than this one,
            # has a gap: what comes after that is drawn again.
            next_ticket, next_position = drawn, drawn_to
            while next_ticket in recorded:
                next_position = 1 + recorded[next_ticket]
                next_ticket += 1
            self._say("DELETE FROM groups WHERE ticket >= ?", (next_ticket,))
            unfinished = {
                ticket: position for ticket, position in waiting.items() if ticket not in recorded
            }
            rows = [row for row in rows if row[0] in waiting or drawn <= row[0] < next_ticket]
        finished = {}
        for ticket, position, version, status, content in rows:
            group = (
                _read(content, task_at(position), ticket, version) if status == FINISHED else None
            )
            if group is not None:
                finished[ticket] = (position, group)
            elif status != GIVEN_BACK:
                unfinished[ticket] = position
        # of the steps from here on, up to one that is not there or that a kill cut in two
        order: list[list[int]] = []
        while len(
            tickets := taken.get(step + len(order) + 1, ())
        ) == groups_per_step and finished.keys() >= set(tickets):
            order.append(list(tickets))
        for ticket, (position, group) in list(finished.items()):
            # of weights that steps would have made that are not there
            if group.admitted_version > step + len(order):
                unfinished[ticket] = position
                del finished[ticket]
        self._say("DELETE FROM consumed WHERE step > ?", (step + len(order),))
        self.flush()
        return Resumed(
            next_position,
            next_ticket,
            dict(sorted(unfinished.items())),
            list(finished.values()),
            order,
        )

    def steps(self) -> list[int]:
        """The steps whose groups are all there, rising."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT step FROM consumed LEFT JOIN groups USING (ticket) GROUP BY step HAVING"
                " count(content) = count(*) ORDER BY step"
            )
            return [step for (step,) in found]

    def groups_of(self, step: int, task_at: TaskAt | None = None) -> list[Group]:
        """The groups that a step consumed, in its order. task_at: gives the task of a position;
        without it a task has an id and nothing else."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT ticket, position, task, admitted_version, content FROM consumed JOIN groups"
                " USING (ticket) WHERE step = ? ORDER BY place",
                (step,),
            ).fetchall()
        return [
            decode(
                content, Task(name, "") if task_at is None else task_at(position), ticket, version
            )
            for ticket, position, name, version, content in found
        ]

    def to_pandas(self) -> Any:
        """One row a trajectory of what was finished, a row without tokens for an episode that was
        not scored: which step consumed it (NaN: none yet), its task, outcome, reward, versions and
        arrays."""
        import pandas

        with self._open() as connection:
            found = connection.execute(
                "SELECT step, ticket, position, task, admitted_version, status, content FROM groups"
                " LEFT JOIN consumed USING (ticket) WHERE content IS NOT NULL ORDER BY ticket"
            ).fetchall()
        return pandas.DataFrame([row for entry in found for row in table_rows(*entry)])

    # ---- the file

    def _connect(self) -> sqlite3.Connection | None:
        """To write with, on another thread; None where the file can only be read."""
        try:
            connection: sqlite3.Connection = sqlite3.connect(
                self.path, timeout=LOCKED_SECONDS, check_same_thread=False
            )
            # Readers do not wait for the writer, and a commit is one append, which `sync` brings to
            # the disk. Where the file system cannot, each commit does.
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
            with connection:
                connection.executescript(TABLES)
        except sqlite3.Error as error:
            if self.path.is_file() and _code(error) in (
                sqlite3.SQLITE_READONLY,
                sqlite3.SQLITE_CANTOPEN,
            ):
                return None
            raise self._unusable(error) from error
        return connection

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection to look with. Raises: UserError for a file that cannot be read."""
        if self._writing is None and self._log.is_file() and self._log.stat().st_size:
            wanted = "copy the run to where you may write, and give the copy"
            raise UserError(
                f"the journal {self.path} was not closed and is in a folder that cannot be written:"
                f" {wanted}"
            )
        how = "mode=rw" if self._writing is not None else "immutable=1"
        try:
            with closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?{how}", uri=True)
            ) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> UserError:
        return UserError(f"the journal {self.path} cannot be opened ({error}): {_wanted(error)}")

    @property
    def _log(self) -> Path:
        """Which of SQLite's files holds what is not in the main one yet."""
        return self.path.with_name(f"{FILE}-wal")

    def _say(self, statement: str, values: tuple[Any, ...]) -> None:
        self._check()
        self._said.put((statement, values))

    def _wait_for(self, written: _Written) -> None:
        self._said.put(written)
        self._urgent.set()
        with waiting("the run", "the journal to be written", self._left):
            while not written.wait(1.0) and self._thread.is_alive():
                pass
        self._check()

    def _left(self) -> str:
        return f"{self._said.qsize()} entries of {self.path} are left"

    def _check(self) -> None:
        if self._error is not None:
            raise UserError(
                f"the journal {self.path} could not be written ({self._error}): make room and go on"
                " with --resume"
            ) from self._error

    def _failed(self, error: BaseException) -> None:
        self._error = self._error or error
        while not self._said.empty():
            if isinstance(entry := self._said.get(), threading.Event):
                entry.set()

    def _write(self) -> None:
        ended = False
        while not ended:
            with waiting("the journal", "entries", idle=True):
                said = [self._said.get()]
            self._urgent.wait(GATHER_SECONDS)
            self._urgent.clear()
            while not self._said.empty():
                said.append(self._said.get())
            ended = None in said
            asked = [entry for entry in said if isinstance(entry, _Written)]
            entries = [entry for entry in said if isinstance(entry, tuple)]
            if self._error is None:  # else there would be a gap
                try:
                    self._transact(entries, durable=any(written.durable for written in asked))
                except Exception as error:
                    self._error = error
            for written in asked:
                written.set()
        if self._writing is not None:
            self._writing.close()

    def _transact(self, entries: Sequence[tuple[str, tuple[Any, ...]]], durable: bool) -> None:
        """All of the entries or none; durable: then everything so far is on the disk."""
        if self._writing is None:
            if entries:
                raise PermissionError("it can only be read")
            return
        with self._writing:
            for statement, values in entries:
                self._writing.execute(
                    statement, [encode(x) if isinstance(x, Group) else x for x in values]
                )
        if durable:
            if self._log.is_file():  # no lock is held on it, so that closing it loses none
                with self._log.open("rb") as log:
                    os.fsync(log.fileno())
            # Moves the log into the main file and syncs that; while somebody reads, the log itself
            # stays.
            self._writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            flush_directory(self.path.parent)


class _Written(threading.Event):
    """Set when every entry before it is written. durable: and on the disk."""

    def __init__(self, durable: bool) -> None:
        super().__init__()
        self.durable = durable


def _wanted(error: sqlite3.Error) -> str:
    if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another program holds it; close that and try again"
    return "give the directory of a run, or move the file away to go on without it"


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code, 0 for an error of Python's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _read(content: bytes, task: Task, ticket: int, version: int) -> Group | None:
    """The group, or None where its bytes are damaged."""
    try:
        return decode(content, task, ticket, version)
    except Exception:
        return None


def table_rows(
    step: int | None,
    ticket: int,
    position: int,
    task: str,
    version: int,
    status: str,
    content: bytes,
) -> Iterator[dict[str, Any]]:
    """The rows of `Journal.to_pandas` of one group."""
    group = decode(content, Task(task, ""), ticket, version)
    whose = {
        "step": step,
        "ticket": ticket,
        "position": position,
        "task": task,
        "admitted_version": version,
        "status": status,
    }
    for number, episode in enumerate(group.episodes):
        outcome = episode.outcome
        row = {
            **whose,
            "episode": number,
            "outcome": type(outcome).__name__,
            "reward": getattr(outcome, "reward", None),
        }
        row |= {name: getattr(outcome, name, None) for name in ("error", "traceback", "details")}
        for t in episode.trajectories or (None,):
            arrays = (
                {}
                if t is None
                else {name: getattr(t, name) for name in ("tokens", "mask", "logprobs", "versions")}
            )
            yield row | (
                {} if t is None else {"length": len(t), "finish_reason": t.finish_reason, **arrays}
            )
