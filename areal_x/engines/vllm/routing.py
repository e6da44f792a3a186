"""Chooses the server for a request: the least loaded one, or one that has the beginning of the
prompt in its prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Int32

BLOCK = 16  # tokens: a server caches whole blocks, of 16 tokens on a GPU and 128 on a CPU
REMEMBERED = 100_000  # blocks: a few megabytes


def choose(loads: Mapping[str, int], cached: Mapping[str, int], slack: int) -> str | None:
    """Returns the server for a request; None if there is none to choose from.

    loads: requests in flight on each server that may be chosen. cached: tokens of the prompt that a
    server has in cache. slack: maximum by which the chosen load may exceed the least. Within it the
    longest cached prefix wins, then the least load, then the order of `loads`.
    """
    least = min(loads.values(), default=0)
    near = [name for name, load in loads.items() if load <= least + slack]
    return min(near, key=lambda name: (-cached.get(name, 0), loads[name]), default=None)


class Prefixes:
    """Remembers which prefixes each server was sent, block by block, as servers cache them. The
    least recently sent are forgotten first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._blocks: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._caches: Counter[str] = Counter()  # how often each server's cache was dropped

    def remember(self, tokens: Int32[np.ndarray, " T"], server: str) -> None:
        for block in blocks(tokens):
            known = (server, self._caches[server], block)
            self._blocks[known] = None
            self._blocks.move_to_end(known)
        while len(self._blocks) > self._remembered:
            self._blocks.popitem(last=False)

    def cached(self, tokens: Int32[np.ndarray, " T"], servers: list[str]) -> dict[str, int]:
        """Returns for each server how many tokens, from the first on, are probably in its cache."""
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
        """Forgets a server's cache, which is dropped when it loads new weights."""
        self._caches[server] += 1


def blocks(tokens: Int32[np.ndarray, " T"]) -> Iterator[int]:
    """Yields, for each whole block, a hash of all tokens up to its end."""
    chain = 0
    data = np.ascontiguousarray(tokens, np.int32)
    for end in range(BLOCK, len(data) + 1, BLOCK):
        chain = hash((chain, data[end - BLOCK : end].tobytes()))
        yield chain
