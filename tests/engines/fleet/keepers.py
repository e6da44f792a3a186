"""Keepers in this process, in place of a cluster's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from areal_x.engines.fleet.placed import Keeper


class LocalKeeper:
    """A keeper in this process. host: its node's address. gone: it does not answer any more."""

    def __init__(self, threads: ThreadPoolExecutor, host: str) -> None:
        self.host = self.node = host
        self.keeper, self.threads, self.ends = Keeper(), threads, 0
        self.calls: list[Future[Any]] = []
        self.gone = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if self.gone:
            called: Future[Any] = Future()
            called.set_exception(ConnectionError(f"its keeper on {self.node} is gone: the node died"))
            return called
        return self.threads.submit(getattr(self.keeper, method), *arguments)

    def end(self) -> None:
        self.ends += 1


K = TypeVar("K", bound=LocalKeeper)


@contextmanager
def keeping(kind: type[K], *arguments: Any) -> Iterator[K]:
    """Yields a keeper of this kind, whose server ends with the body."""
    with ThreadPoolExecutor(8) as threads:
        keeper = kind(threads, *arguments)
        yield keeper
        keeper.keeper.stop()
