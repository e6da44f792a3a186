"""Keepers in this process, in place of a cluster's."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from areal_x.engines.vllm.placed import Keeper


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
