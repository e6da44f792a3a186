"""An index over a run's journal: one row of numbers per trajectory, in memory, built once and
continued while the run goes on.

A row takes 30 bytes, a group 46 and its task's name, so a million trajectories in groups of eight
take about 40 MB, whatever their length: tokens are read from the journal when they are looked at.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.lab.columns import Columns, Names
from areal_x.lab.reading import connection_to, head_of, signature
from areal_x.run.group_bytes import decode, read_head
from areal_x.run.journal import ADMITTED, FINISHED, GIVEN_BACK
from areal_x.run.run_dir import LOCK
from areal_x.types import Task

OUTCOMES = ("scored", "failed", "timed_out")
STATUSES = (FINISHED, GIVEN_BACK)
PRUNED = len(STATUSES)  # a group that the journal had, and has no more
NONE = -1
CHUNK = 256  # groups that one statement reads: it holds the journal's log for so long
WHOLE_BYTES = 1 << 16  # of longer groups, only the header is read
MOST_ERRORS = 1000  # different ones; the others are counted together
ERROR_CHARACTERS, TRACEBACK_CHARACTERS = 2000, 8000
MOST_REASONS = 255  # different finish reasons: a column of bytes
REFRESH_SECONDS = 1.0
OTHER = "(further errors)"
ROW_COLUMNS = {
    "group": "i4",
    "episode": "i4",
    "trajectory": "i4",
    "outcome": "u1",
    "reward": "f4",
    "length": "i4",
    "trained": "i4",
    "finish": "u1",
    "error": "i4",
}
GROUP_COLUMNS = {
    "ticket": "i8",
    "position": "i8",
    "version": "i4",
    "step": "i4",
    "place": "i4",
    "status": "u1",
    "recorded": "u1",
    "first": "i8",
    "rows": "i4",
}
GROUPS = (
    "SELECT ticket, position, task, admitted_version, status, length(content),"
    f" CASE WHEN length(content) <= {WHOLE_BYTES} THEN content END FROM groups"
)


@dataclass
class Failure:
    """An error that episodes failed with."""

    error: str

    traceback: str = ""
    """The first that was recorded."""

    count: int = 0

    first_ticket: int = 0
    """The group of the first episode."""


class Index:
    """The trajectories of a run's journal, as columns.

    rows: per trajectory, and one without tokens per episode that was not scored: `group` and
    `episode` (numbers), `trajectory` (its number in the group; -1 without tokens), `outcome` (in
    OUTCOMES), `reward` (the episode's; NaN without), `length` and `trained` (tokens), `finish` (in
    `reasons`), `error` (in `failures`; -1 without).
    groups: `ticket`, `position`, `version` (at admission), `step` and `place` (-1: not consumed),
    `status` (in STATUSES, or PRUNED), `recorded` (1: with what training made of its
    tokens), `first` and `rows` (of the other table).
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.stale = False
        """True once the run was resumed, which takes groups back, or most groups were pruned:
        another index of the journal has to replace this one, which no longer changes. Setting it
        ends a build."""

        self._lock = threading.Lock()  # of whoever appends
        self.rows = Columns(**ROW_COLUMNS)
        self.groups = Columns(**GROUP_COLUMNS)
        self.tasks = Names()
        self.reasons: list[str] = []
        self.failures: list[Failure] = []
        self.selected: Any = None
        """The last selection of rows, with what was asked: see `select`."""

        self.changes = 0
        """Grows whenever something in the columns has changed."""

        self.unreadable = 0
        """Groups whose bytes are damaged."""

        self.error = ""
        """Why the journal could not be read to its end; "" if it was."""

        self.newest, self.oldest = NONE, NONE  # tickets
        self.reached = NONE  # the newest ticket that the index has seen
        self.built = False
        self._by_ticket = np.full(1, NONE, np.int32)  # from the first ticket
        self._open: set[int] = set()
        self._numbers: dict[str, int] = {}  # of failures
        self._consumed = (NONE, NONE)  # the last step and place
        self._recorded = NONE  # the last step
        self._oldest_step = NONE
        self._pruned = 0
        self._seen: Any = None
        self._began: Any = None
        self._refreshed = 0.0

    # ---- reading the journal

    @property
    def progress(self) -> float:
        """The share of the journal that the index has."""
        if self.built or self.newest < 0:
            return 1.0 if self.built else 0.0
        return min(1.0, (self.reached - self.oldest + 1) / max(self.newest - self.oldest + 1, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return self.rows.nbytes + self.groups.nbytes + self.tasks.nbytes + self._by_ticket.nbytes

    @property
    def has_pruned(self) -> bool:
        """True if the journal no longer keeps some of the groups."""
        return self._pruned > 0

    def refresh(self) -> None:
        """Adds what the journal has got since. Returns at once while another thread does it, within
        a second of the last time, or if the journal has not changed."""
        if (
            self.stale
            or time.monotonic() - self._refreshed < REFRESH_SECONDS
            or not self._lock.acquire(blocking=False)
        ):
            return
        try:
            seen = signature(self.run)
            if seen != self._seen:
                began = (seen[0][0], _started(self.run))
                if self._began not in (None, began):
                    self.stale = True
                    return
                self._began = began
                self._continue()
                self._seen = seen
            self._refreshed = time.monotonic()
        finally:
            self._lock.release()

    def _continue(self) -> None:
        try:
            with connection_to(self.run) as connection:
                oldest, newest = connection.execute(
                    "SELECT (SELECT min(ticket) FROM groups), (SELECT max(ticket) FROM groups)"
                ).fetchone()
                if newest is None:
                    newest = oldest = NONE
                if newest < self.reached or 2 * self._pruned > len(self.groups) > 0:
                    self.stale = True
                    return
                if self.newest == NONE:
                    self.oldest = oldest
                self.newest = newest
                self._read_open(connection)
                self._read_new(connection)
                self._read_consumed(connection)
                self._read_recorded(connection)
                self._mark_pruned(connection)
            self.error = ""
        except UserError as error:
            self.error = str(error)
        self.built = True

    def _read_open(self, connection: sqlite3.Connection) -> None:
        """Reads the groups that were in flight."""
        waiting = sorted(self._open)
        for begin in range(0, len(waiting), CHUNK):
            part = waiting[begin : begin + CHUNK]
            found = connection.execute(
                f"{GROUPS} WHERE ticket IN ({','.join('?' * len(part))})", part
            ).fetchall()
            self._open -= set(part) - {row[0] for row in found}
            self._add(connection, found)

    def _read_new(self, connection: sqlite3.Connection) -> None:
        while not self.stale:
            found = connection.execute(
                f"{GROUPS} WHERE ticket > ? ORDER BY ticket LIMIT {CHUNK}", (self.reached,)
            ).fetchall()
            if not found:
                return
            self._add(connection, found)
            self.reached = found[-1][0]
            if not self.built:  # a first build leaves the other threads time to answer
                self._read_consumed(connection)
                time.sleep(0.001)

    def _add(self, connection: sqlite3.Connection, found: Sequence[tuple[Any, ...]]) -> None:
        """Appends the groups that have ended, all at once: an append costs as much as a group."""
        groups: dict[str, list[Any]] = {name: [] for name in GROUP_COLUMNS}
        rows: dict[str, list[Any]] = {name: [] for name in ROW_COLUMNS}
        tasks: list[str] = []
        for ticket, position, task, version, status, size, content in found:
            if status == ADMITTED or size is None:
                self._open.add(ticket)
                continue
            self._open.discard(ticket)
            first = len(rows["outcome"])
            try:
                head, at = read_head(content) if content else head_of(connection, ticket)
                described = self._rows_of(connection, head, ticket, at, content)
            except (sqlite3.Error, UserError):
                raise
            except Exception:  # whatever damaged bytes raise
                self.unreadable += 1
                continue
            number = len(self.groups) + len(tasks)
            count = len(described[0])
            for column, values in zip(rows.values(), ([number] * count, *described), strict=True):
                column += values
            of_group = (
                ticket,
                position,
                version,
                NONE,
                NONE,
                STATUSES.index(status),
                0,
                len(self.rows) + first,
                count,
            )
            for column, value in zip(groups.values(), of_group, strict=True):
                column.append(value)
            tasks.append(task or "")
        if tasks:
            number = len(self.groups)
            self.tasks.extend(tasks)
            self.groups.append(groups)
            self.rows.append(rows)  # last: a row's group is there
            for place, ticket in enumerate(groups["ticket"]):
                self._number(ticket, number + place)
        self.changes += 1

    def _rows_of(
        self,
        connection: sqlite3.Connection,
        head: dict[str, Any],
        ticket: int,
        at: int,
        content: bytes | None,
    ) -> list[list[Any]]:
        """Returns the rows of a group's header, as the columns after `group`."""
        described = head["trajectories"]
        trained = _trained(head, [length for length, *_ in described])
        if trained is None:  # a mask that changes too often to be in the header
            if content is None:
                ((content,),) = connection.execute(
                    "SELECT content FROM groups WHERE ticket = ?", (ticket,)
                )
            group = decode(content, Task("", ""), ticket, 0)
            trained = [int(t.mask.sum()) for e in group.episodes for t in e.trajectories]
        found: list[tuple[Any, ...]] = []
        trajectory = 0
        for episode, ((kind, values), count) in enumerate(head["episodes"]):
            reward = values.get("reward")
            reward = np.nan if reward is None else reward
            error = self._failure(values, ticket) if kind == "failed" else NONE
            outcome = OUTCOMES.index(kind)
            if not count:
                found.append((episode, NONE, outcome, reward, 0, 0, self._reason(""), error))
            for number in range(trajectory, trajectory + count):
                length, _, reason, _ = described[number]
                numbers = (length, trained[number], self._reason(reason))
                found.append((episode, number, outcome, reward, *numbers, error))
            trajectory += count
        return [list(column) for column in zip(*found, strict=True)] or [[] for _ in ROW_COLUMNS][
            1:
        ]

    def _reason(self, reason: str) -> int:
        if reason not in self.reasons:
            if len(self.reasons) >= MOST_REASONS:
                return self.reasons.index("")
            self.reasons.append(reason)
        return self.reasons.index(reason)

    def _failure(self, values: dict[str, Any], ticket: int) -> int:
        error = str(values.get("error", ""))[:ERROR_CHARACTERS]
        if error not in self._numbers and len(self.failures) >= MOST_ERRORS:
            error = OTHER
        number = self._numbers.setdefault(error, len(self.failures))
        if number == len(self.failures):
            self.failures.append(Failure(error, first_ticket=ticket))
        found = self.failures[number]
        found.count += 1
        found.traceback = (
            found.traceback or str(values.get("traceback", ""))[-TRACEBACK_CHARACTERS:]
        )
        return number

    def _number(self, ticket: int, number: int) -> None:
        place = ticket - self.oldest
        if place >= len(self._by_ticket):
            enlarged = np.full(max(place + 1, 2 * len(self._by_ticket)), NONE, np.int32)
            enlarged[: len(self._by_ticket)] = self._by_ticket
            self._by_ticket = enlarged
        self._by_ticket[place] = number

    def number_of(self, ticket: int) -> int:
        """Returns a group's number in `groups`; -1 if the index has none of this ticket."""
        place = ticket - self.oldest
        return int(self._by_ticket[place]) if 0 <= place < len(self._by_ticket) else NONE

    def in_order(self) -> Any:
        """Returns the numbers of all groups, by ticket."""
        known = len(self.groups)
        numbers = self._by_ticket
        return numbers[(numbers != NONE) & (numbers < known)]

    def _read_consumed(self, connection: sqlite3.Connection) -> None:
        while True:
            found = connection.execute(
                "SELECT step, place, ticket FROM consumed WHERE (step, place) > (?, ?)"
                f" ORDER BY step, place LIMIT {CHUNK * 4}",
                self._consumed,
            ).fetchall()
            for step, place, ticket in found:
                number = self.number_of(ticket)
                if number == NONE:
                    if ticket > self.reached or ticket in self._open:
                        return  # the group is read first
                else:
                    self.groups.column("step")[number] = step
                    self.groups.column("place")[number] = place
                self._consumed = (step, place)
            if not found:
                return
            self.changes += 1

    def _read_recorded(self, connection: sqlite3.Connection) -> None:
        """Marks the groups of which the journal has what training made of their tokens."""
        try:
            found = connection.execute(
                "SELECT step, ticket FROM trained WHERE step >= ? ORDER BY step",
                (self._recorded,),
            ).fetchall()
        except sqlite3.OperationalError:  # a journal of an earlier version, without the table
            return
        marked = False
        for step, ticket in found:
            number = self.number_of(ticket)
            if number != NONE and self.groups.column("step")[number] == step:
                marked |= not self.groups.column("recorded")[number]
                self.groups.column("recorded")[number] = 1
                self._recorded = step
        self.changes += marked  # the last step's were marked before

    def _mark_pruned(self, connection: sqlite3.Connection) -> None:
        """Marks the groups that the journal no longer keeps."""
        (oldest,) = connection.execute("SELECT min(step) FROM consumed").fetchone()
        if oldest is None or oldest == self._oldest_step:
            return
        steps, tickets = self.groups.column("step"), self.groups.column("ticket")
        status = self.groups.column("status")
        old = (steps >= 0) & (steps < oldest)
        if old.any():
            last = int(tickets[old].max())
            there = connection.execute("SELECT ticket FROM groups WHERE ticket <= ?", (last,))
            kept = np.fromiter((ticket for (ticket,) in there), np.int64)
            gone = (tickets <= last) & ~np.isin(tickets, kept)
            status[gone] = PRUNED
            self._pruned = int((status == PRUNED).sum())
            self.changes += 1
        self._oldest_step = oldest


def _trained(head: dict[str, Any], lengths: Sequence[int]) -> Any:
    """Returns the number of trained tokens of each trajectory, from the runs of the mask; None if
    it is not stored as runs."""
    _, described = head["arrays"]["mask"]
    if described is None:
        return []
    if described[3] != "runs":
        return None
    ends, values = (np.asarray(x, np.int64) for x in described[4:])
    until = np.cumsum(np.diff(ends, prepend=0) * values)
    bounds = np.cumsum([0, *lengths])
    return np.diff(np.interp(bounds, [0, *ends], [0, *until])).astype(np.int64)


def _started(run: Path) -> int:
    """Returns the time at which the run was last started or resumed; 0 if it is not known."""
    try:
        return (run / LOCK).stat().st_mtime_ns
    except OSError:
        return 0
