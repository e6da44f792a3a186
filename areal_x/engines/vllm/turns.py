"""Exact versions of tokens on servers that do not report them: no answer spans a swap.

    pause      holds requests back, ends those in flight, waits for their answers
    resume     lets requests through again

While a server is paused it computes nothing, and its weights change only between the two, so that
all tokens of an answer have the version that the client had set before. A request that reaches the
server only after the pause has begun is answered by nothing until it ends: it is withdrawn, and
sent again afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet import slices
from areal_x.protocols.engine import Completion
from areal_x.runtime.waits import waiting, whose

GENERATE = "/inference/v1/generate"
SECONDS_TO_ANSWER = 5.0  # requests that have ended; those without an answer are withdrawn
Answer = TypeVar("Answer")
Tokens = Int32[np.ndarray, " prompt"]
Part = Callable[[Tokens, int], Awaitable[tuple[Completion, bool]]]


class Turns:
    """Lets requests through between swaps. Made inside the event loop that uses it."""

    def __init__(self, url: str) -> None:
        self.version = 0
        """Of the server's weights, as the client has set it."""
        self._url = url
        self._swaps = 0  # that have begun
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._withdrawn: set[asyncio.Future[Any]] = set()

    async def answered(self, send: Callable[[], Awaitable[Answer]]) -> tuple[Answer, int, bool]:
        """Returns an answer, the version of all its tokens, and whether a swap may have ended
        it."""
        while True:
            with waiting(whose(), f"the server at {self._url} to answer {GENERATE}"):
                await self._open.wait()
                version, swaps = self.version, self._swaps
                sent = asyncio.ensure_future(send())
                self._in_flight.add(sent)
                try:
                    return await sent, version, self._swaps != swaps
                except asyncio.CancelledError:
                    if sent not in self._withdrawn:
                        sent.cancel()
                        raise
                finally:
                    self._in_flight.discard(sent)
                    self._withdrawn.discard(sent)

    async def hold(self, end: Callable[[], Awaitable[None]]) -> None:
        """Holds requests back until `release`, and returns when none is in flight. end: makes the
        server end those that it has."""
        self._swaps += 1
        self._open.clear()
        await end()
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=SECONDS_TO_ANSWER)
            self._withdrawn |= late
            for sent in late:
                sent.cancel()

    def release(self) -> None:
        self._open.set()


async def in_parts(part: Part, tokens: Tokens, most: int, stop: Sequence[str]) -> Completion:
    """Returns a completion that a swap has ended and that goes on under the next version, each part
    in an answer of its own; from its beginning where it cannot go on.

    part: generates so many tokens at most from a prompt, and returns whether a swap may have ended
    them.
    """
    parts: list[Completion] = []
    while True:
        prompt = slices.context_of(tokens, parts)
        left = most - (len(prompt) - len(tokens))
        found, swapped = await part(prompt, left)
        if found.finish_reason != "abort" or not swapped:
            return slices.joined([*parts, found])
        if len(found.tokens) == left:
            return replace(slices.joined([*parts, found]), finish_reason="length")
        if slices.is_part(found, stop):
            parts.append(found)
