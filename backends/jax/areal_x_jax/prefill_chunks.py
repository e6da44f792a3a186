"""Prompts cut into chunks of one size, so that prompts of any length and number share one prefill
program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from areal_x_jax.prompt_images import ChunkImages, PromptImages, images_of_chunk


class Chunk(NamedTuple):
    """Packed tokens of several sequences for one prefill.

    Piece i is tokens first[i] … first[i] + length[i] of the chunk, for columns start[i] … of
    slot[i]. Only piece 0 may continue a sequence, of which `past` tokens are already in the cache.
    positions: in the sequence. images: None if no piece is of a sequence with images.
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
    images: ChunkImages | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a sequence to prefill; `past` of its tokens are already in the cache."""

    slot: int
    column: int
    tokens: np.ndarray
    past: int
    images: PromptImages | None = None
    """Of the whole sequence."""


def packed(
    pieces: Sequence[tuple[int, int, np.ndarray]],
    size: int,
    capacity: int,
    images: Sequence[PromptImages | None] = (),
) -> Iterator[Chunk]:
    """Yields chunks of `size` tokens of these sequences (slot, first column, tokens), one after
    another, cut where a chunk ends. images: of each sequence, if any has some.

    The tokens of an image that see each other are in one chunk: it is cut before them, and one that
    they do not fit into is the least size · 2^n long.
    """
    cut: list[Piece] = []
    room = size
    for (slot, column, tokens), shown in zip_longest(pieces, images):

        def piece(
            start: int,
            stop: int,
            slot: int = slot,
            column: int = column,
            tokens: np.ndarray = tokens,
            shown: PromptImages | None = shown,
        ) -> Piece:
            return Piece(slot, (column + start) % capacity, tokens[start:stop], start, shown)

        done = 0
        while done < len(tokens):
            stop = min(done + room, len(tokens))
            if shown is not None:
                stop = shown.before_image(stop)
            if stop == done and shown is not None and not cut:  # no chunk of this size holds it
                stop = shown.end_of_image(done)
                yield _chunk(
                    [piece(done, stop)], size << (-(-(stop - done) // size) - 1).bit_length()
                )
                done = stop
                continue
            if stop > done:
                cut.append(piece(done, stop))
            done, room = stop, room - (stop - done)
            if room == 0 or done < len(tokens):
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
        images=images_of_chunk([(p.images, p.past, len(p.tokens)) for p in pieces], size),
    )
