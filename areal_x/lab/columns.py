"""Columns of numbers that grow at their end, for tables of millions of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SMALLEST = 1024  # rows that a table has room for at first
GROWTH = 1.5


class Columns:
    """A table of numpy columns with room at their ends.

    One thread appends; others may read `column` at any time: what they hold is the table as it was,
    as rows before `len` move to new arrays only when the table is enlarged.
    """

    def __init__(self, **types: str) -> None:
        self._arrays = {name: np.empty(SMALLEST, kind) for name, kind in types.items()}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take, the room at their ends included."""
        return sum(x.nbytes for x in self._arrays.values())

    def column(self, name: str, length: int | None = None) -> Any:
        """Returns the first `length` values of a column, by default all, as a view."""
        return self._arrays[name][: self._length if length is None else length]

    def append(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Appends rows: a sequence for each column, all of one length."""
        (count,) = {len(x) for x in values.values()}
        end = self._length + count
        room = len(next(iter(self._arrays.values())))
        if end > room:
            room = max(end, int(room * GROWTH))
            for name, old in self._arrays.items():
                enlarged = np.empty(room, old.dtype)
                enlarged[: self._length] = old[: self._length]
                self._arrays[name] = enlarged
        for name, array in self._arrays.items():
            array[self._length : end] = values[name]
        self._length = end  # last: a reader finds whole rows


class Names:
    """Texts, joined into one pool of bytes: a dataset may have as many names as a run has groups."""

    def __init__(self) -> None:
        self._pool = bytearray()
        self._ends = Columns(end="i8")

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def nbytes(self) -> int:
        return len(self._pool) + self._ends.nbytes

    def extend(self, texts: Sequence[str]) -> None:
        ends = []
        for text in texts:
            self._pool += text.encode("utf-8", "replace") + b"\0"
            ends.append(len(self._pool))
        self._ends.append({"end": ends})

    def __getitem__(self, number: int) -> str:
        ends = self._ends.column("end")
        begin = int(ends[number - 1]) if number else 0
        return self._pool[begin : int(ends[number]) - 1].decode()

    def containing(self, part: str) -> Any:
        """Returns the numbers of the texts that contain a part, as a sorted array."""
        wanted = part.encode("utf-8", "replace")
        ends = self._ends.column("end")
        pool = np.frombuffer(bytes(self._pool), np.uint8)  # a copy: another thread may append
        if not wanted or b"\0" in wanted or len(wanted) > len(pool):
            return np.empty(0, np.int64)
        begins = np.flatnonzero(pool[: len(pool) - len(wanted) + 1] == wanted[0])
        for place, letter in enumerate(wanted[1:], 1):
            begins = begins[pool[begins + place] == letter]
        numbers = np.unique(np.searchsorted(ends, begins, side="right"))
        return numbers[numbers < len(ends)]
