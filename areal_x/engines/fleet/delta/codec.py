"""The change of a tensor between two versions, exactly: which numbers differ in any bit, and by how much.

A tensor is a row of words, the bits of its numbers as unsigned integers, in blocks of BLOCK words. Of
each block:

    count      of the words that differ; 0 ends the block
    mask       one bit a word, unless all differ
    planes     of the differences new - base, modulo the words' range and with the sign in the lowest bit:
               all lowest bytes, then all second ones, …

A small step moves a number by a few units in its last place, so the differences are small whole numbers
and the upper planes zeros: that compresses better than the exclusive or of the bits, of which a carry
makes many ones. Each part is compressed by zlib, without searching for repetitions, where that is
shorter. Nothing is rounded, and no number is treated as a number: -0.0 differs from 0.0, and a NaN from
one of another payload.

Used inside servers too: it imports nothing but numpy and the standard library.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

BLOCK = 2**20  # words: the working memory is a few times as much, whatever the size of a tensor
SAMPLE = 2**12  # bytes of a part that are compressed to see whether the rest is worth it
WORTH = 0.95  # of its length
LENGTH = struct.Struct("<I")

Words = np.ndarray[Any, np.dtype[Any]]


class Broken(ValueError):
    """The bytes are not those of a delta of this base."""


def words_of(data: np.ndarray, width: int) -> Words:
    """Returns the words of contiguous numbers, or of bytes. width: bytes of a number."""
    flat = data.reshape(-1)
    return flat.view(f"u{width if width in (1, 2, 4, 8) else 1}")


def encoded(new: Words, base: Words) -> bytes:
    """Returns the change of one block."""
    changed = new != base
    count = int(np.count_nonzero(changed))
    if not count:
        return LENGTH.pack(0)
    if count == len(new):
        parts = [b""]
        difference = new - base
    else:
        parts = [np.packbits(changed).tobytes()]
        difference = new[changed] - base[changed]
    sign = difference >> (8 * difference.itemsize - 1)
    folded = (difference << 1) ^ (0 - sign)
    parts += [plane.tobytes() for plane in folded.view(np.uint8).reshape(count, -1).T]
    return LENGTH.pack(count) + b"".join(map(stored, parts))


def stored(part: bytes) -> bytes:
    """Returns a part with its length in front; compressed if it is shorter so."""
    if len(part) > SAMPLE and len(compressed(part[:SAMPLE])) > WORTH * SAMPLE:
        return LENGTH.pack(len(part)) + part
    shorter = min(part, compressed(part), key=len)  # the part itself where both have its length
    return LENGTH.pack(len(shorter)) + shorter


def compressed(part: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(part) + packer.flush()


class Reader:
    """Reads the changes of a tensor's blocks, one after the other, from bytes that may be anything."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def apply(self, words: Words) -> None:
        """Changes one block in place. Raises: Broken."""
        (count,) = LENGTH.unpack(self._take(LENGTH.size))
        if not count:
            return
        if count > len(words):
            raise Broken(f"it changes {count} of {len(words)} numbers")
        size = 0 if count == len(words) else -(-len(words) // 8)
        mask = np.frombuffer(self._part(size), np.uint8)
        planes = np.empty((count, words.itemsize), np.uint8)
        for byte in range(words.itemsize):
            planes[:, byte] = np.frombuffer(self._part(count), np.uint8)
        folded = planes.view(words.dtype)[:, 0]
        difference = (folded >> 1) ^ (0 - (folded & 1))
        if not size:
            words += difference
            return
        bits = np.unpackbits(mask)
        if bits[len(words) :].any() or int(np.count_nonzero(bits)) != count:
            raise Broken("its positions are not as many as its values, or outside the tensor")
        words[bits[: len(words)].view(bool)] += difference

    def end(self) -> None:
        """Raises: Broken if there are bytes left."""
        if self._at != len(self._data):
            raise Broken("it has more than the changes of its blocks")

    def _part(self, size: int) -> bytes | memoryview:
        (length,) = LENGTH.unpack(self._take(LENGTH.size))
        part = self._take(length)
        if length == size:
            return part
        try:  # never more than `size` is unpacked, whatever the part claims
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            found = unpacker.decompress(part, size) if size else b""
        except zlib.error as error:
            raise Broken(f"a part of it cannot be unpacked ({error})") from error
        if len(found) != size or unpacker.unconsumed_tail or not unpacker.eof:
            raise Broken("a part of it has another length than its numbers")
        return found

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise Broken("it is truncated")
        self._at += size
        return taken
