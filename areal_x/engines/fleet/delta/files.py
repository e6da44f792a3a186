"""The files of a delta, and the digest of a version.

    delta.bin     the changes of each tensor (areal_x.engines.fleet.delta.codec), one after the other
    delta.json    the digest of the base version and of the result, and where each tensor's changes are

The digest of a version is the SHA-256 of the names, types, shapes and SHA-256 of all its tensors: the
same whatever the files that they are in. (The sums of areal_x.engines.fleet.proof would not do: they
take zeros of either sign for alike, and whoever wants a collision can compute one.)

Used inside servers too: it imports nothing but numpy and the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.engines.fleet.delta.codec import BLOCK, LENGTH, Words, encoded, words_of

DELTA, INDEX = "delta.bin", "delta.json"
# numpy's names as safetensors has them; others are their letter and bits
TYPES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
Tensors = Iterable[tuple[str, np.ndarray]]


class NoDelta(Exception):
    """The versions differ in more than the values of their tensors, or a delta would not be smaller."""


class Digest:
    """Computes the digest of a version from its tensors, in any order."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[Any]] = {}

    def of(self, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors, and adds each."""
        for name, tensor in tensors:
            self.add(
                name, type_name(tensor.dtype), tensor.shape, hashlib.sha256(bytes_of(tensor).data)
            )
            yield name, tensor

    def add(self, name: str, dtype: str, shape: Sequence[int], of_bytes: Any) -> None:
        """Adds a tensor. of_bytes: the SHA-256 of its bytes. (A scalar has the shape [1], as files of
        weights have it.)"""
        self._tensors[name] = [dtype, list(shape) or [1], of_bytes.hexdigest()]

    def hexdigest(self) -> str:
        return hashlib.sha256(json.dumps(self._tensors, sort_keys=True).encode()).hexdigest()


def type_name(dtype: np.dtype[Any]) -> str:
    """Returns safetensors' name of a type."""
    return TYPES.get(dtype.name, f"{dtype.kind.upper()}{8 * dtype.itemsize}")


def bytes_of(tensor: np.ndarray) -> Words:
    """Returns the bytes of a contiguous tensor, without a copy."""
    return words_of(tensor, 1)


class Encoder:
    """Writes a delta. base, base_digest: the version that servers have. most_bytes: the size from
    which whole files are better."""

    def __init__(self, base: Mapping[str, np.ndarray], base_digest: str, most_bytes: int) -> None:
        self._base, self._base_digest, self._most_bytes = base, base_digest, most_bytes
        self.digest = ""
        """Of the version that was written."""

    def write(self, folder: Path, tensors: Tensors) -> dict[str, int]:
        """Writes the files, one block in memory at a time, and returns their sizes. Raises:
        NoDelta."""
        digest, places, unseen = Digest(), dict[str, list[int]](), set(self._base)
        with (folder / DELTA).open("wb") as file:
            for name, tensor in digest.of(tensors):
                unseen.discard(name)
                base = self._base.get(name)
                if base is None or (base.shape, base.dtype) != (tensor.shape, tensor.dtype):
                    raise NoDelta(f"{name} has another shape or type than before")
                began, changed = file.tell(), False
                for block in blocks_of(tensor, base):
                    changed |= len(block) > LENGTH.size
                    file.write(block)
                if changed:
                    places[name] = [began, file.tell() - began]
                else:
                    file.seek(began)
                if file.tell() > self._most_bytes:
                    raise NoDelta("whole files are smaller")
            file.truncate()
        if unseen:
            raise NoDelta(f"{min(unseen)} is gone")
        self.digest = digest.hexdigest()
        index = {"base": self._base_digest, "digest": self.digest, "tensors": places}
        (folder / INDEX).write_text(json.dumps(index))
        return {name: (folder / name).stat().st_size for name in (DELTA, INDEX)}


def blocks_of(tensor: np.ndarray, base: np.ndarray) -> Iterator[bytes]:
    new, old = (words_of(x, x.dtype.itemsize) for x in (tensor, base))
    for start in range(0, len(new), BLOCK):
        yield encoded(new[start : start + BLOCK], old[start : start + BLOCK])
