"""Searches the text of trajectories, a slice of time at once.

A million answers are gigabytes, of which the journal has only token ids: no search through all of
them takes less than seconds. So a search returns what it found after a fraction of a second, and
where it stopped; whoever asked goes on from there, or not.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.lab.index import NONE, Index
from areal_x.lab.reading import connection_to, head_of
from areal_x.lab.vocabulary import Vocabulary
from areal_x.run.group_bytes import decode_array

SECONDS = 0.2  # of one call
PAGE = 512  # rows that are looked at between two looks at the clock
AROUND = 60  # characters of an excerpt, on both sides of what was found
MOST_TOKENS = 1 << 22  # of a group that is searched; a longer one is left out


@dataclass(frozen=True)
class Found:
    """A trajectory that contains the text."""

    row: int

    before: str
    match: str
    after: str


@dataclass(frozen=True)
class Slice:
    """The result of one call: what was found, and from which place of the order to go on."""

    found: Sequence[Found]

    next: int
    """The first row of the order that was not searched."""

    left_out: int
    """Trajectories that cannot be searched: pruned since, damaged or too long."""


def search(
    run: Path,
    index: Index,
    vocabulary: Vocabulary,
    rows: Any,
    text: str,
    most: int,
    begin: int = 0,
    seconds: float = SECONDS,
) -> Slice:
    """Searches trajectories, by the numbers of their rows, for a text, in their order, until `most`
    are found or the time is over. ASCII letters are the same in either case.

    begin: the place of `rows[0]` in the whole order, for `Slice.next`.
    """
    wanted = text.encode("utf-8", "replace").lower()
    until = time.monotonic() + seconds
    found: list[Found] = []
    left_out = 0
    group_of = index.rows.column("group")[rows]
    number_in = index.rows.column("trajectory")[rows]
    tickets = index.groups.column("ticket")[group_of]
    kept: tuple[int, Any] = (NONE, None)
    place = 0
    with connection_to(run) as connection:
        for place, row in enumerate(rows.tolist()):
            if len(found) >= most or (place and time.monotonic() > until):
                return Slice(found, begin + place, left_out)
            if number_in[place] == NONE:
                continue
            if kept[0] != tickets[place]:
                kept = (int(tickets[place]), _tokens(connection, int(tickets[place])))
            if kept[1] is None:
                left_out += 1
                continue
            tokens, bounds = kept[1]
            number = number_in[place]
            own = tokens[bounds[number] : bounds[number + 1]].tolist()
            content = vocabulary.bytes_of(own)
            if (at := content.lower().find(wanted)) >= 0:
                found.append(_excerpt(row, content, at, len(wanted)))
    return Slice(found, begin + len(rows), left_out)


def _tokens(connection: sqlite3.Connection, ticket: int) -> tuple[Any, Any] | None:
    """Returns the tokens of a group's trajectories, joined, and where each begins, reading nothing
    else of the group; None if it cannot be read."""
    try:
        head, at = head_of(connection, ticket)
        described = head["trajectories"]
        # Arrays of images are before the tokens; in older journals beside trajectories.
        for images in (*head.get("images", ()), *(images for *_, images in described)):
            if isinstance(images, dict):
                at += sum(size for size, *_ in images.values())
        _, stored = head["arrays"]["tokens"]
        bounds = np.cumsum([0, *(length for length, *_ in described)])
        if stored is None or bounds[-1] > MOST_TOKENS:
            return None
        size, *form = stored
        with connection.blobopen("groups", "content", ticket, readonly=True) as blob:
            blob.seek(at)
            return decode_array(form, blob.read(size)), bounds
    except Exception:  # whatever damaged bytes raise, or a group that was pruned since
        return None


def _excerpt(row: int, content: bytes, at: int, size: int) -> Found:
    begin, end = max(0, at - 4 * AROUND), at + size + 4 * AROUND
    return Found(
        row,
        content[begin:at].decode("utf-8", "replace")[-AROUND:],
        content[at : at + size].decode("utf-8", "replace"),
        content[at + size : end].decode("utf-8", "replace")[:AROUND],
    )
