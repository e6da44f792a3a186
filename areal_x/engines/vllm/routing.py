"""Where a request goes: to the server with the fewest, or to one that has the beginning of its
prompt in cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Int32

BLOCK = 16  # tokens: a GPU server caches whole blocks of this many (one on a CPU, of 128)
REMEMBERED = 100_000  # blocks, some megabytes


def choose(loads: Mapping[str, int], cached: Mapping[str, int], slack: int) -> str | None:
    """The server for a request; None when there is none to choose from.

    loads: requests in flight on each server that may be chosen. cached: tokens of the prompt that a
    server has in cache. slack: the most by which the chosen one's load may exceed the least. Within
    it the longest cached beginning wins, then the least load, then the order of `loads`.
    """
    least = min(loads.values(), default=0)
    near = [name for name, load in loads.items() if load <= least + slack]
    return min(near, key=lambda name: (-cached.get(name, 0), loads[name]), default=None)


class Prefixes:
    """Which server was sent which beginnings of sequences, block by block, as servers cache them.
    What was sent longest ago is forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._blocks: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._caches: Counter[str] = Counter()  # how many each server has had

    def remember(self, tokens: Int32[np.ndarray, " T"], server: str) -> None:
        for block in blocks(tokens):
            known = (server, self._caches[server], block)
            self._blocks[known] = None
            self._blocks.move_to_end(known)
        while len(self._blocks) > self._remembered:
            self._blocks.popitem(last=False)

    def cached(self, tokens: Int32[np.ndarray, " T"], servers: list[str]) -> dict[str, int]:
        """How many tokens from the first on each server has probably in cache."""
        chain = list(blocks(tokens))
        found = {}
        for server in servers:
            cache = self._caches[server]
            count = next(
                (i for i, block in enumerate(chain) if (server, cache, block) not in self._blocks),
                len(chain),
            )
            found[server] = count * BLOCK
        return found

    def forget(self, server: str) -> None:
        """Its cache was dropped, as it is for new weights."""
        self._caches[server] += 1


def blocks(tokens: Int32[np.ndarray, " T"]) -> Iterator[int]:
    """A number for each whole block that depends on all tokens up to its end."""
    chain = 0
    data = np.ascontiguousarray(tokens, np.int32)
    for end in range(BLOCK, len(data) + 1, BLOCK):
        chain = hash((chain, data[end - BLOCK : end].tobytes()))
        yield chain
