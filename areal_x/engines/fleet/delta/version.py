"""Makes the whole files of a version on the server's side of a slow link: from those of its base and a
delta, or by copying whole ones.

What is read may be anything: files that are truncated, of another run, or that somebody has replaced.
The digest that the result must have is the trainer's, and came with the order.

Used inside servers: it imports nothing but numpy and the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.engines.fleet.delta.codec import BLOCK, Broken, Reader, Words, words_of
from areal_x.engines.fleet.delta.files import DELTA, INDEX, Digest
from areal_x.engines.fleet.manifest import header

MOST_INDEX = 2**28  # bytes of an index that are read


class Delta:
    """A delta, whose files may be anything. Raises: Broken."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        index = files.enter_context(opened(folder / INDEX)).read(MOST_INDEX)
        try:
            found = json.loads(index)
            self.base, self.digest = str(found["base"]), str(found["digest"])
            self._places = {
                str(name): (int(start), int(size))
                for name, (start, size) in found["tensors"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Broken(f"{INDEX} is no index of a delta") from error
        self.names = self._places.keys()
        self._file = files.enter_context(opened(folder / DELTA))

    def of(self, name: str) -> Reader | None:
        """Returns the changes of a tensor; None if it has none."""
        if name not in self._places:
            return None
        start, size = self._places[name]
        if not 0 <= start <= start + size <= os.fstat(self._file.fileno()).st_size:
            raise Broken(f"the changes of {name} are outside {DELTA}")
        self._file.seek(start)
        return Reader(memoryview(self._file.read(size)))


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a file for reading. Raises: Broken for a link, or what is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Broken(f"{path.name} cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        yield file


def write_version(target: Path, sources: Iterable[Path], delta: Delta | None) -> str:
    """Writes safetensors files as the sources are, or as a delta makes them. One block is in memory at
    a time, and the changes of one tensor. Returns the digest of what was written.

    Raises: Broken if they cannot be read or do not fit together; OSError if there is no room.
    """
    digest, changed = Digest(), set[str]()
    for source in sources:
        with opened(source) as file, (target / source.name).open("wb") as made:
            try:
                head, entries = header(file)
                tensors = [
                    (tuple(entry["data_offsets"]), name, str(entry["dtype"]), list(entry["shape"]))
                    for name, entry in entries.items()
                ]
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise Broken(f"{source.name} is no safetensors file") from error
            made.write(head)
            end = 0
            for (start, stop), name, dtype, shape in sorted(tensors):
                if not start == end <= stop:
                    raise Broken(f"{source.name} has gaps between its tensors")
                end = stop
                changes = None if delta is None else delta.of(name)
                found = hashlib.sha256()
                for words in blocks(file, stop - start, prod(shape)):
                    if changes is not None:
                        changes.apply(words)
                    found.update(words.data)
                    made.write(words.data)
                if changes is not None:
                    changes.end()
                    changed.add(name)
                digest.add(name, dtype, shape, found)
    if delta is not None and (more := delta.names - changed):
        raise Broken(f"it changes {min(more)}, which the base has not")
    return digest.hexdigest()


def blocks(file: BufferedReader, size: int, count: int) -> Iterator[Words]:
    """Yields the next bytes of a file as blocks of words. count: of the numbers that they are."""
    width = size // count if count else 1
    data = np.empty(BLOCK * width, np.uint8)
    words: np.ndarray[Any, Any] = words_of(data, width)
    for start in range(0, size, len(words) * words.itemsize):
        part = words[: (size - start) // words.itemsize]
        if file.readinto(part.data.cast("B")) != part.nbytes:
            raise Broken("a file of weights is truncated")
        yield part
