"""What a restarted server knows: requests before they are answered, and their results.

    request ──▶ line of its model ──▶ result          a task writes the entries, one transaction
         └───────── entries ────────────┘──▶ journal.sqlite    for all that arrived meanwhile

A request is on disk before its client learns its id (`written`), its result shortly after it is
there. So after a kill at any moment, requests without a result are run again, in the order of their
numbers, on the newest snapshot of their model (areal_x/tinker/recovery.py). The entries of one key
are of its digest, and the file is readable by this user alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal_x.errors import UserError
from areal_x.runtime import background
from areal_x.runtime.thread import OneThread

FILE = "journal.sqlite"
GONE = b""  # in place of a result that made room
TABLES = """
CREATE TABLE IF NOT EXISTS about (content TEXT);
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT, content TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, content TEXT, snapshot INTEGER
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, content TEXT, joined INTEGER
);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT, whose TEXT, number INTEGER, kind TEXT, wire INTEGER, body BLOB,
    outcome BLOB
);
CREATE INDEX IF NOT EXISTS requests_whose ON requests (whose, number);
"""
LOCKED_SECONDS = 1.0  # for which a second server of one directory waits


class Sent(NamedTuple):
    """A request as it arrived. wire: whether its body is protocol buffers, else JSON."""

    kind: str
    body: bytes
    wire: bool = False


class Row(NamedTuple):
    """A request of the journal. whose: the id of its model or sampler. body: None once no restart
    needs it. outcome: None until it has one."""

    id: str
    whose: str
    number: int
    sent: Sent
    has_body: bool
    outcome: bytes | None


class Journal:
    """The journal of a server's directory, written from its event loop.

    After a failed transaction nothing more is written, so the file has no gap. Raises: UserError
    for a file that cannot be opened, or is another server's.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._entries: list[tuple[str, tuple[Any, ...]]] = []
        self._appended = self._committed = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._thread = OneThread("the journal of areal-x tinker")
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            self._file = sqlite3.connect(self.path, LOCKED_SECONDS, check_same_thread=False)
            # Nobody else reads or writes it. A commit is one append to the log, and flushes it.
            for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._file.execute(f"PRAGMA {setting}")
            with self._file:
                self._file.executescript(TABLES)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{self.path} cannot be opened ({error}): stop the other server of this directory,"
                " or give another --directory"
            ) from error

    # ---- writing

    def append(self, statement: str, *values: Any) -> None:
        """Adds an entry. Raises: OSError after a failed transaction."""
        self._check()
        self._entries.append((statement, values))
        self._appended += 1
        if self._task is None:
            self._task = background.start(self._write(), "the journal of areal-x tinker")

    async def written(self) -> None:
        """Returns when every entry so far is on disk. Raises: OSError if one cannot be written."""
        self._check()
        if self._committed < self._appended:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._appended, done))
            await done
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(
                f"{self.path} could not be written ({self._error}): make room and start the server"
                " again"
            ) from self._error

    async def _write(self) -> None:
        try:
            while self._entries and self._error is None:
                entries, self._entries = self._entries, []
                try:
                    await self._thread.run(self._transact, entries)
                    self._committed += len(entries)
                except (OSError, sqlite3.Error) as error:
                    self._error = error
                late = self._committed if self._error is None else self._appended
                ready = [done for target, done in self._waiters if target <= late]
                self._waiters = [x for x in self._waiters if x[0] > late]
                for done in ready:
                    if not done.done():
                        done.set_result(None)
        finally:
            self._task = None

    def _transact(self, entries: list[tuple[str, tuple[Any, ...]]]) -> None:
        with self._file:
            for statement, values in entries:
                self._file.execute(statement, values)

    async def close(self) -> None:
        """Writes the remaining entries and closes the file."""
        while self._task is not None:
            await asyncio.wait({self._task})
        self._thread.close()
        self._file.close()

    # ---- entries

    def session(self, owner: str, id: str, content: Mapping[str, Any]) -> None:
        self.append("INSERT INTO sessions VALUES (?, ?, ?)", id, owner, json.dumps(content))

    def model(self, owner: str, id: str, session: str, content: Mapping[str, Any]) -> None:
        values = id, owner, session, json.dumps(content)
        self.append("INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, -1)", *values)

    def sampler(self, owner: str, id: str, session: str, content: Mapping[str, Any]) -> None:
        values = id, owner, session, json.dumps(content)
        self.append("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, 0)", *values)

    def sampler_moved(self, id: str, content: Mapping[str, Any]) -> None:
        """Records that a sampler has other weights."""
        self.append("UPDATE samplers SET content = ? WHERE id = ?", json.dumps(content), id)

    def joined(self, id: str, number: int) -> None:
        self.append("UPDATE samplers SET joined = ? WHERE id = ?", number, id)

    def request(self, owner: str, id: str, whose: str, number: int, sent: Sent) -> None:
        self.append(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL)",
            *(id, owner, whose, number, sent.kind, sent.wire, sent.body),
        )

    def outcome(self, id: str, outcome: bytes, needed: bool) -> None:
        """needed: whether the model's next snapshot still needs the request."""
        kept = "" if needed else ", body = NULL"
        self.append(f"UPDATE requests SET outcome = ?{kept} WHERE id = ?", outcome, id)

    def snapshot(self, model: str, number: int) -> None:
        """Records that a snapshot of a model has the effects of its requests up to a number."""
        self.append("UPDATE models SET snapshot = ? WHERE id = ?", number, model)
        self.append(
            "UPDATE requests SET body = NULL WHERE whose = ? AND number <= ? AND outcome IS NOT NULL",
            *(model, number),
        )

    def dropped(self, id: str) -> None:
        """Deletes a result."""
        self.append("UPDATE requests SET outcome = ? WHERE id = ?", GONE, id)

    def forgotten(self, id: str) -> None:
        self.append("DELETE FROM requests WHERE id = ? AND body IS NULL", id)

    def delete_session(self, id: str) -> None:
        self.append("DELETE FROM sessions WHERE id = ?", id)

    def delete_model(self, id: str) -> None:
        self.append("DELETE FROM models WHERE id = ?", id)
        self.append("DELETE FROM requests WHERE whose = ?", id)

    def delete_sampler(self, id: str) -> None:
        self.append("DELETE FROM samplers WHERE id = ?", id)
        self.append("DELETE FROM requests WHERE whose = ?", id)

    # ---- reading, before anything is appended

    def check(self, content: Mapping[str, Any]) -> None:
        """Records what a server's models stand on, or compares. Raises: UserError if it is another
        than at the last start, and there are models."""
        own = json.dumps(content, sort_keys=True)
        found = self._file.execute("SELECT content FROM about").fetchone()
        if found is not None and found[0] != own and self.rows("models"):
            was = json.loads(found[0])
            changed = ", ".join(
                f"{name} was {was.get(name)!r} and is {x!r}"
                for name, x in content.items()
                if was.get(name) != x
            )
            raise UserError(
                f"{self.path} has models of another base ({changed}): start the server as before, or"
                " give another --directory"
            )
        with self._file:
            self._file.execute("DELETE FROM about")
            self._file.execute("INSERT INTO about VALUES (?)", (own,))

    def rows(self, table: str, owner: str | None = None) -> list[tuple[Any, ...]]:
        """Returns the rows of sessions, models or samplers, the oldest first."""
        where, values = ("", ()) if owner is None else (" WHERE owner = ?", (owner,))
        found = self._file.execute(f"SELECT * FROM {table}{where} ORDER BY rowid", values)
        return found.fetchall()

    def requests(self, owner: str) -> list[Row]:
        """Returns an owner's requests, those of each model in the order of their numbers. Bodies
        are left out: `body_of`."""
        found = self._file.execute(
            "SELECT id, whose, number, kind, wire, body IS NOT NULL, outcome FROM requests"
            " WHERE owner = ? ORDER BY whose, number",
            (owner,),
        )
        return [
            Row(id, whose, number, Sent(kind, b"", bool(wire)), bool(has_body), outcome)
            for id, whose, number, kind, wire, has_body, outcome in found
        ]

    def body_of(self, id: str) -> bytes:
        (found,) = self._file.execute("SELECT body FROM requests WHERE id = ?", (id,)).fetchone()
        return bytes(found)
