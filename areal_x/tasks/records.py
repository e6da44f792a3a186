"""Records of a dataset that stay in its files: each is read when it is used, so that a dataset may be
larger than memory.

| file | in memory | a record is read by |
|---|---|---|
| .jsonl | the place of each line | one seek |
| .arrow, .feather | nothing: the file is mapped | its batch's columns |
| .parquet | the row groups that were used last | decompressing its row group |
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from areal_x.errors import UserError

SUFFIXES = (".jsonl", ".parquet", ".arrow", ".feather")
KEPT_GROUPS = 8  # decompressed row groups of a file


class Records(Protocol):
    """The records of a file, with a place for messages about each."""

    def __len__(self) -> int: ...

    def at(self, index: int) -> tuple[str, Any]:
        """Returns the place of a record and the record. Raises: UserError if it cannot be read."""
        ...


def open_records(file: Path) -> Records:
    """Opens a file by its suffix. Raises: UserError for a file that is damaged, or whose package is
    not installed."""
    if file.suffix == ".jsonl":
        return JsonLines(file)
    try:
        return Parquet(file) if file.suffix == ".parquet" else Arrow(file)
    except ImportError:
        raise UserError(
            f"{file} needs the package pyarrow: pip install 'areal-x[parquet]'"
        ) from None
    except (OSError, ValueError) as error:  # of which pyarrow's are subclasses
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {reason})") from None


def files_of(directory: Path, split: str) -> list[Path]:
    """Returns the files of a split in a directory: <split>.jsonl, <split>.parquet …, or the parts
    <split>-00000-of-00002.parquet … in their order."""
    for suffix in SUFFIXES:
        if (file := directory / f"{split}{suffix}").is_file():
            return [file]
        if parts := sorted(directory.glob(f"{split}-*{suffix}")):
            return parts
    return []


def each(records: Records) -> Iterator[tuple[str, Any]]:
    """Yields every record with its place."""
    if isinstance(records, JsonLines):  # `at` opens its file
        return records.all()
    return (records.at(index) for index in range(len(records)))


class JsonLines:
    """A file with a JSON object a line; blank lines are skipped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[tuple[int, int]] = []  # the number of each line, and where it begins
        with file.open("rb") as lines:
            place = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._lines.append((number, place))
                place += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def all(self) -> Iterator[tuple[str, Any]]:
        """Yields every record with its place, from one pass over the file."""
        with self.file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{self.file}:{number}", parsed_line(self.file, number, line)

    def at(self, index: int) -> tuple[str, Any]:
        number, place = self._lines[index]
        with self.file.open("rb") as lines:
            lines.seek(place)
            line = lines.readline()
        return f"{self.file}:{number}", parsed_line(self.file, number, line)


def parsed_line(file: Path, number: int, line: bytes | str) -> Any:
    """Returns the value of a line. Raises: UserError for one that is not JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        reason = str(error)
    raise UserError(f"{file}:{number} is not JSON ({reason})")


class Table:
    """Records in groups of rows, of which the last used ones are kept. read: returns a group as
    pyarrow's table."""

    def __init__(self, file: Path, sizes: Sequence[int], read: Callable[[int], Any]) -> None:
        self.file, self._read = file, read
        self._ends = list(accumulate(sizes))
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def at(self, index: int) -> tuple[str, Any]:
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        if number not in self._kept:
            self._kept[number] = self._read(number)
            if len(self._kept) > KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        (record,) = self._kept[number].slice(index - first, 1).to_pylist()
        return f"record {index} of {self.file}", record


def Parquet(file: Path) -> Table:
    """Returns the records of a Parquet file."""
    import pyarrow.parquet as parquet

    opened = parquet.ParquetFile(file)
    about = opened.metadata
    sizes = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    return Table(file, sizes, opened.read_row_group)


def Arrow(file: Path) -> Table:
    """Returns the records of an Arrow file: IPC's file form (Feather), or its stream form, in which
    `datasets` saves."""
    import pyarrow

    mapped = pyarrow.memory_map(str(file))
    try:
        opened = pyarrow.ipc.open_file(mapped)
        batches = [opened.get_batch(i) for i in range(opened.num_record_batches)]
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        batches = list(pyarrow.ipc.open_stream(mapped))
    return Table(file, [len(batch) for batch in batches], batches.__getitem__)
