"""The durable record of the groups that a run sampled and consumed: a killed run resumes from it
without losing or repeating any, and a finished run is replayed from it.

    runner ──admitted, finished, given back, consumed──▶ a thread ──one transaction after the other──▶ journal.sqlite

Every call returns at once; the thread writes the entries in order, so whenever the process is
killed the file has all entries up to a moment shortly before. `flush` waits until they are written,
`sync` until they are on disk: a checkpoint is written only after the entries that it depends on. If
a power failure nevertheless took the end of the journal, the checkpoint's own state replaces it
(`Journal.resumed`).
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

from areal_x.errors import UserError, at_least, within
from areal_x.run.checkpoint import flush_directory
from areal_x.run.group_bytes import decode, encode
from areal_x.run.token_record import SHARE, TokenRecord
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
CREATE TABLE IF NOT EXISTS trained (ticket INTEGER PRIMARY KEY, step INTEGER, content BLOB);
CREATE INDEX IF NOT EXISTS trained_step ON trained (step);
"""
ADMIT = "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, NULL)"
END = "UPDATE groups SET status = ?, content = ? WHERE ticket = ?"
CONSUME = "INSERT OR REPLACE INTO consumed VALUES (?, ?, ?)"
TRAIN = "INSERT OR REPLACE INTO trained VALUES (?, ?, ?)"
LOCKED_SECONDS = 30.0  # for which a write waits while another program locks the file
# A transaction costs as much as writing several groups, so entries wait this long to share one.
GATHER_SECONDS = 0.25
TaskAt = Callable[[int], Task]  # the task at a position of the stream


@gin.configurable("journal")
@dataclass(frozen=True)
class JournalConfig:
    """The amount of a run that its journal keeps."""

    keep_steps: int = 1000
    """Steps before the newest checkpoint whose groups are kept for inspection and replay; groups
    that a resumed run needs are always kept. 0 keeps all, at 5 to 7 bytes per token."""

    token_share: float = SHARE
    """Share of the groups of which the journal also keeps what training made of each token: its
    advantage, the trainer's log-probability and the entropy, at 8 bytes per trained token. 0 keeps
    none."""

    entropy: bool = False
    """True makes each step compute the entropies of all trained tokens for the journal. Without it
    they are kept where the loss needs them (`entropy_coefficient`)."""

    def __post_init__(self) -> None:
        at_least("journal.keep_steps", self.keep_steps, 0)
        within("journal.token_share", self.token_share, 0, 1)


@dataclass(frozen=True)
class Resumed:
    """Where a rollout continues."""

    position: int = 0
    """Position of the dataset's next task."""

    next_ticket: int = 0
    """Ticket of the next group."""

    unfinished: Mapping[int, int] = field(default_factory=dict)
    """Tickets of the groups to run again, with the positions of their tasks."""

    finished: Sequence[tuple[int, Group]] = ()
    """Groups that wait to be consumed, each with its position."""

    order: Sequence[Sequence[int]] = ()
    """Tickets of the next steps, if a run that continued from here before has consumed them."""

    workflow: Any = None
    """The workflow's own state; None if it has none."""


class Recorder(Protocol):
    """Receives the events of a runner's groups."""

    def admitted(self, group: Group, position: int) -> None: ...

    def finished(self, group: Group) -> None: ...

    def given_back(self, group: Group) -> None: ...

    def consumed(self, step: int, groups: Sequence[Group]) -> None: ...


class NullRecorder:
    """A recorder that keeps nothing."""

    def admitted(self, group: Group, position: int) -> None: ...

    def finished(self, group: Group) -> None: ...

    def given_back(self, group: Group) -> None: ...

    def consumed(self, step: int, groups: Sequence[Group]) -> None: ...


class Journal:
    """The journal in a run's directory, for writing and reading. Leaving the context writes the
    remaining entries.

    After a failed transaction nothing more is written, so the file never has a gap and a resumed
    run continues from its end. A journal without write permission can be read.

    Raises: UserError for a file that is not a journal, and from every call after a failed write.
    """

    def __init__(self, run: Path, keep_steps: int = 0) -> None:
        self.path = run / FILE
        self.keep_steps = keep_steps
        self._entries: SimpleQueue[Any] = SimpleQueue()
        self._urgent = threading.Event()
        self._error: BaseException | None = None
        self._writing = self._connect()  # used by the thread
        self._thread = background.thread(
            self._write, what="the journal's thread", failed=self._failed, name="journal"
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.put(None)
        self._urgent.set()
        with waiting("the run", "the journal to be closed", self._left):
            self._thread.join()

    # ---- writing

    def admitted(self, group: Group, position: int) -> None:
        """Records that the group took a slot, for the first time or again, for the task at this
        position of the stream."""
        self._append(
            ADMIT, (group.ticket, position, group.task.id, group.admitted_version, ADMITTED)
        )

    def finished(self, group: Group) -> None:
        """Records that the group waits to be consumed."""
        self._append(END, (FINISHED, group, group.ticket))

    def given_back(self, group: Group) -> None:
        """Records that the group is not trained on; keeps its outcomes without its tokens."""
        outcomes = tuple(Episode(episode.outcome) for episode in group.episodes)
        self._append(
            END,
            (
                GIVEN_BACK,
                Group(group.task, group.ticket, group.admitted_version, outcomes),
                group.ticket,
            ),
        )

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """Records that the step with this number trains on these groups, in this order."""
        for place, group in enumerate(groups):
            self._append(CONSUME, (step, place, group.ticket))

    def trained(self, step: int, records: Mapping[int, TokenRecord]) -> None:
        """Records what a step made of the tokens of groups, by ticket."""
        for ticket, record in records.items():
            self._append(TRAIN, (ticket, step, record))

    def prune(self, oldest_checkpoint: int, step: int) -> None:
        """Deletes the groups older than `keep_steps` before `step` that no run resumed from the
        oldest checkpoint needs."""
        if self.keep_steps:
            last = min(oldest_checkpoint, step - self.keep_steps)
            # The newest ticket stays: tickets and positions continue from it.
            self._append(
                "DELETE FROM groups WHERE ticket < (SELECT max(ticket) FROM groups) AND ("
                "ticket IN (SELECT ticket FROM consumed WHERE step <= ?) OR "
                "status = ? AND ticket < (SELECT max(ticket) FROM consumed WHERE step <= ?))",
                (last, GIVEN_BACK, last),
            )
            self._append("DELETE FROM consumed WHERE step <= ?", (last,))
            self._append("DELETE FROM trained WHERE step <= ?", (last,))

    def flush(self) -> None:
        """Returns when every entry is in the file."""
        self._wait_for(_Written(durable=False))

    def sync(self) -> None:
        """Returns when every entry is on disk, safe from a power failure."""
        self._wait_for(_Written(durable=True))

    # ---- reading

    def resumed(
        self,
        step: int,
        task_at: TaskAt,
        groups_per_step: int,
        before: int | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> Resumed | None:
        """Returns where the rollout continues from the checkpoint of `step`; None if nothing is
        known.

        Groups consumed after the checkpoint are consumed again, in the same order, as long as steps
        have the same size.

        task_at: returns the task at a position. before: deletes the groups from this ticket on, and
        the record of their consumption. saved: the `Rollout.state` of the checkpoint, which
        replaces a missing end of the journal: groups trained on by then are not trained on again,
        and admitted ones keep their tickets.
        """
        if before is not None:
            self._append("DELETE FROM groups WHERE ticket >= ?", (before,))
            self._append("DELETE FROM consumed WHERE step > ?", (step,))
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
            waiting = dict(saved["unfinished"])
            saved_ticket = saved["next_ticket"]
            recorded = {ticket: position for ticket, position, *_ in rows}
            # A journal that lost its end once, and continued after a later checkpoint than this
            # one, has a gap: groups after the gap are sampled again.
            next_ticket, next_position = saved_ticket, saved["position"]
            while next_ticket in recorded:
                next_position = 1 + recorded[next_ticket]
                next_ticket += 1
            self._append("DELETE FROM groups WHERE ticket >= ?", (next_ticket,))
            unfinished = {
                ticket: position for ticket, position in waiting.items() if ticket not in recorded
            }
            rows = [
                row for row in rows if row[0] in waiting or saved_ticket <= row[0] < next_ticket
            ]
        finished = {}
        for ticket, position, version, status, content in rows:
            group = (
                _read(content, task_at(position), ticket, version) if status == FINISHED else None
            )
            if group is not None:
                finished[ticket] = (position, group)
            elif status != GIVEN_BACK:
                unfinished[ticket] = position
        # The next steps, up to one that is missing or that a kill interrupted.
        order: list[list[int]] = []
        while len(
            tickets := taken.get(step + len(order) + 1, ())
        ) == groups_per_step and finished.keys() >= set(tickets):
            order.append(list(tickets))
        for ticket, (position, group) in list(finished.items()):
            # Sampled with weights of steps that are lost.
            if group.admitted_version > step + len(order):
                unfinished[ticket] = position
                del finished[ticket]
        self._append("DELETE FROM consumed WHERE step > ?", (step + len(order),))
        self._append("DELETE FROM trained WHERE step > ?", (step,))
        self.flush()
        return Resumed(
            next_position,
            next_ticket,
            dict(sorted(unfinished.items())),
            list(finished.values()),
            order,
        )

    def steps(self) -> list[int]:
        """Returns the steps whose groups are complete, in ascending order."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT step FROM consumed LEFT JOIN groups USING (ticket) GROUP BY step HAVING"
                " count(content) = count(*) ORDER BY step"
            )
            return [step for (step,) in found]

    def groups_of(self, step: int, task_at: TaskAt | None = None) -> list[Group]:
        """Returns the groups that a step consumed, in order. task_at: returns the task at a
        position; without it, tasks have only an id."""
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

    def groups(self) -> Iterator[Group]:
        """Yields the groups that ended, in the order of their tickets: those that were consumed or
        wait, and, without tokens, those that were given back. Their tasks have only an id."""
        with self._open() as connection:
            found = connection.execute(
                "SELECT ticket, task, admitted_version, content FROM groups WHERE content IS NOT NULL"
                " ORDER BY ticket"
            ).fetchall()
        for ticket, name, version, content in found:
            yield decode(content, Task(name, ""), ticket, version)

    def to_pandas(self) -> Any:
        """Returns a table with one row per trajectory of the finished groups, and a row without
        tokens for an episode that was not scored: the step that consumed it (NaN: none yet), task,
        outcome, reward, versions and arrays."""
        import pandas

        with self._open() as connection:
            found = connection.execute(
                "SELECT step, ticket, position, task, admitted_version, status, content FROM groups"
                " LEFT JOIN consumed USING (ticket) WHERE content IS NOT NULL ORDER BY ticket"
            ).fetchall()
        return pandas.DataFrame([row for entry in found for row in table_rows(*entry)])

    # ---- the file

    def _connect(self) -> sqlite3.Connection | None:
        """Returns the connection for writing, which another thread uses; None if the file can only
        be read."""
        try:
            connection: sqlite3.Connection = sqlite3.connect(
                self.path, timeout=LOCKED_SECONDS, check_same_thread=False
            )
            # With a write-ahead log, readers do not wait for the writer, and a commit is one append,
            # which `sync` flushes. On file systems without it, each commit flushes.
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
        """Yields a connection for reading. Raises: UserError for a file that cannot be read."""
        if self._writing is None and self._log.is_file() and self._log.stat().st_size:
            wanted = "copy the run to a folder that you may write to, and use the copy"
            raise UserError(
                f"the journal {self.path} was not closed and is in a folder that cannot be written:"
                f" {wanted}"
            )
        mode = "mode=rw" if self._writing is not None else "immutable=1"
        try:
            with closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?{mode}", uri=True)
            ) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> UserError:
        return UserError(f"the journal {self.path} cannot be opened ({error}): {_wanted(error)}")

    @property
    def _log(self) -> Path:
        """SQLite's write-ahead log: transactions that are not yet in the main file."""
        return self.path.with_name(f"{FILE}-wal")

    def _append(self, statement: str, values: tuple[Any, ...]) -> None:
        self._check()
        self._entries.put((statement, values))

    def _wait_for(self, written: _Written) -> None:
        self._entries.put(written)
        self._urgent.set()
        with waiting("the run", "the journal to be written", self._left):
            while not written.wait(1.0) and self._thread.is_alive():
                pass
        self._check()

    def _left(self) -> str:
        return f"{self._entries.qsize()} entries of {self.path} are left"

    def _check(self) -> None:
        if self._error is not None:
            raise UserError(
                f"the journal {self.path} could not be written ({self._error}): make room and continue"
                " with --resume"
            ) from self._error

    def _failed(self, error: BaseException) -> None:
        self._error = self._error or error
        while not self._entries.empty():
            if isinstance(entry := self._entries.get(), threading.Event):
                entry.set()

    def _write(self) -> None:
        ended = False
        while not ended:
            with waiting("the journal", "entries", idle=True):
                received = [self._entries.get()]
            self._urgent.wait(GATHER_SECONDS)
            self._urgent.clear()
            while not self._entries.empty():
                received.append(self._entries.get())
            ended = None in received
            waits = [entry for entry in received if isinstance(entry, _Written)]
            entries = [entry for entry in received if isinstance(entry, tuple)]
            if self._error is None:  # else there would be a gap
                try:
                    self._transact(entries, durable=any(written.durable for written in waits))
                except Exception as error:
                    self._error = error
            for written in waits:
                written.set()
        if self._writing is not None:
            self._writing.close()

    def _transact(self, entries: Sequence[tuple[str, tuple[Any, ...]]], durable: bool) -> None:
        """Writes all of the entries or none. durable: flushes everything so far to disk."""
        if self._writing is None:
            if entries:
                raise PermissionError("it can only be read")
            return
        with self._writing:
            for statement, values in entries:
                self._writing.execute(statement, [_stored(x) for x in values])
        if durable:
            if self._log.is_file():  # no lock is held on it that closing would release
                with self._log.open("rb") as log:
                    os.fsync(log.fileno())
            # Moves the log into the main file and flushes that; while there are readers, the log
            # stays.
            self._writing.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            flush_directory(self.path.parent)


class _Written(threading.Event):
    """Set when every entry before it is written. durable: and flushed to disk."""

    def __init__(self, durable: bool) -> None:
        super().__init__()
        self.durable = durable


def _stored(x: Any) -> Any:
    if isinstance(x, Group):
        return encode(x)
    return x.encode() if isinstance(x, TokenRecord) else x


def _wanted(error: sqlite3.Error) -> str:
    if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another program has locked it; close that and try again"
    return "name the directory of a run, or move the file away to continue without it"


def _code(error: sqlite3.Error) -> int:
    """Returns SQLite's primary error code; 0 for an error that Python raised."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _read(content: bytes, task: Task, ticket: int, version: int) -> Group | None:
    """Returns the group; None if its bytes are damaged."""
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
    """Yields the rows of one group for `Journal.to_pandas`."""
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
