"""Makes versions in a server's process, on a thread, so that the server generates meanwhile.

A call is answered at once, and repeated until the version is there: {"folder": …, "root": …} with the
place of the whole version, {"working": True} while this process or another one of the machine makes it,
or {"refused": sentence}.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from areal_x.engines.fleet.delta.cache import Cache, Order, parsed
from areal_x.runtime import background

Answer = dict[str, Any]
WORKING: Answer = {"working": True}


class Maker:
    """The versions of one process."""

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._job: tuple[Order, Future[Path | None]] | None = None

    def answer(self, text: str) -> Answer:
        """Answers an order, and begins to make its version. text: areal_x.engines.fleet.delta.cache.parsed."""
        try:
            order = parsed(text)
            if self._job is not None and not self._job[1].done():
                return WORKING
            job, self._job = self._job, None
            if job is not None and job[0] == order:
                job[1].result()  # raises why it could not be made
            cache = self._cache_of(order)
            if (made := cache.find(order.digest)) is not None:
                return {"folder": f"{made}", "root": f"{cache.folder}"}
            self._job = order, background.future(lambda: cache.make(order), name="delta")
            return WORKING
        except Exception as error:  # the engine would end
            return {"refused": f"{error}" or type(error).__name__}

    def _cache_of(self, order: Order) -> Cache:
        cache = self._cache
        if cache is not None and (cache.run != order.run or not cache.is_there()):
            cache.close()
            cache = None
        if cache is None:
            cache = self._cache = Cache(order.parent, order.run)
        return cache

    def forget(self) -> Answer:
        """Removes all versions."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.remove()
        return {}
