"""Prompts cut into chunks of one size, so that prompts of any length and number share one prefill
program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int


class Chunk(NamedTuple):
    """Packed tokens of several sequences for one prefill.

    Piece i is tokens first[i] … first[i] + length[i] of the chunk, for columns start[i] … of
    slot[i]. Only piece 0 may continue a sequence, of which `past` tokens are already in the cache.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    piece: Int[Array, " tokens"]
    slot: Int[Array, " pieces"]
    start: Int[Array, " pieces"]
    first: Int[Array, " pieces"]
    length: Int[Array, " pieces"]
    count: Int[Array, ""]
    past: Int[Array, ""]


@dataclass(frozen=True)
class Piece:
    """A part of a sequence to prefill; `past` of its tokens are already in the cache."""

    slot: int
    column: int
    tokens: np.ndarray
    past: int


def packed(
    pieces: Sequence[tuple[int, int, np.ndarray]], size: int, capacity: int
) -> Iterator[Chunk]:
    """Yields chunks of `size` tokens of these sequences (slot, first column, tokens), one after
    another, cut where a chunk ends."""
    cut: list[Piece] = []
    room = size
    for slot, column, tokens in pieces:
        done = 0
        while done < len(tokens):
            taken = min(room, len(tokens) - done)
            cut.append(Piece(slot, (column + done) % capacity, tokens[done : done + taken], done))
            done, room = done + taken, room - taken
            if room == 0:
                yield _chunk(cut, size)
                cut, room = [], size
    if cut:
        yield _chunk(cut, size)


def _chunk(pieces: Sequence[Piece], size: int) -> Chunk:
    lengths = np.array([len(p.tokens) for p in pieces])

    def padded(values: Any, fill: int = 0) -> np.ndarray:
        values = np.asarray(values, np.int32)
        return np.concatenate([values, np.full(size - len(values), fill, np.int32)])

    return Chunk(
        tokens=padded(np.concatenate([p.tokens for p in pieces])),
        positions=padded(np.concatenate([p.past + np.arange(len(p.tokens)) for p in pieces])),
        piece=padded(np.repeat(np.arange(len(pieces)), lengths), fill=-1),
        slot=padded([p.slot for p in pieces]),
        start=padded([p.column for p in pieces]),
        first=padded(np.cumsum(lengths) - lengths),
        length=padded(lengths),
        count=np.int32(len(pieces)),
        past=np.int32(pieces[0].past),
    )
