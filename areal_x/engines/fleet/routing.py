"""Chooses the server for a request: the least loaded one, or one that has the beginning of the
prompt in its prefix cache. The cost of a choice does not depend on the number of servers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

BLOCK = 16  # tokens: a server caches whole blocks, of 16 tokens on a GPU and 128 on a CPU
GROWTH = 8  # from 8 * BLOCK tokens on, a prefix is remembered at steps of an eighth of its length
HOLDERS = 4  # servers remembered for one prefix, the last ones that it was sent to
REMEMBERED = 100_000  # prefixes: some 30 MB


class Loads:
    """The requests in flight on each server that takes more, by name. Every method takes constant
    time; equally loaded servers are given out in turn."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        self._with_load: dict[int, dict[str, None]] = {}
        self._least = 0

    def set(self, name: str, load: int) -> None:
        """Adds the server, or changes its load."""
        if self._load.get(name) == load:
            return
        self.remove(name)
        self._load[name] = load
        self._with_load.setdefault(load, {})[name] = None
        if len(self._load) == 1 or load < self._least:
            self._least = load

    def remove(self, name: str) -> None:
        load = self._load.pop(name, None)
        if load is None:
            return
        equal = self._with_load[load]
        del equal[name]
        if not equal:
            del self._with_load[load]
        while self._load and self._least not in self._with_load:
            self._least += 1

    def get(self, name: str) -> int | None:
        return self._load.get(name)

    @property
    def least(self) -> int | None:
        """The least load; None without servers."""
        return self._least if self._load else None

    def first(self) -> str | None:
        """Returns the least loaded server, of several the one that has been it longest."""
        return next(iter(self._with_load[self._least])) if self._load else None


def choose(loads: Loads, cached: Mapping[str, int], slack: int) -> str | None:
    """Returns the server for a request; None if there is none to choose from.

    cached: tokens of the prompt that a server has in cache, by name. slack: maximum by which the
    chosen load may exceed the least. Within it the longest cached prefix wins, then the least load.
    """
    least = loads.least
    if least is None:
        return None
    near = []
    for name, tokens in cached.items():
        load = loads.get(name)
        if tokens and load is not None and load <= least + slack:
            near.append((-tokens, load, name))
    return min(near)[2] if near else loads.first()


class Prefixes:
    """Remembers which prefixes each server was sent. The least recently sent are forgotten
    first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        # The servers that each prefix was sent to, the last one last, with their caches' numbers.
        self._holders: OrderedDict[int, tuple[tuple[str, int], ...]] = OrderedDict()
        self._caches: Counter[str] = Counter()  # how often each server's cache was dropped

    def remember(self, prefixes: Sequence[tuple[int, int]], server: str) -> None:
        """prefixes: see `prefixes_of`."""
        holder = (server, self._caches[server])
        alone = (holder,)
        for _, prefix in prefixes:
            holders = self._holders.pop(prefix, alone)
            if holders[-1] != holder:
                holders = (*[x for x in holders if x != holder][1 - HOLDERS :], holder)
            self._holders[prefix] = holders
        while len(self._holders) > self.remembered:
            self._holders.popitem(last=False)

    def cached(self, prefixes: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Returns how many tokens, from the first on, are probably in a server's cache, for a few
        servers that have most of them."""
        found: dict[str, int] = {}
        for length, prefix in reversed(prefixes):
            for server, cache in self._holders.get(prefix, ()):
                if cache == self._caches[server]:
                    found.setdefault(server, length)
            if len(found) >= HOLDERS:
                break
        return found

    def forget(self, server: str) -> None:
        """Forgets a server's cache, which is dropped when it loads new weights."""
        self._caches[server] += 1


def prefixes_of(
    tokens: Int32[np.ndarray, " T"], known: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """Returns the lengths of some prefixes, each in whole blocks, and a hash of the tokens up to
    there: every block of short ones, steps of an eighth of the length of long ones.

    known: those of the first tokens, which are left out.
    """
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    found = []
    start, chain = known[-1] if known else (0, 0)
    while (end := start + BLOCK * max(1, start // (GROWTH * BLOCK))) <= len(tokens):
        chain = hash((chain, data[4 * start : 4 * end]))
        found.append((end, chain))
        start = end
    return found
