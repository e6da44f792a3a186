"""A shard as the driver sees it. All of it belongs to the rollout's event loop, except what says
otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from areal_x.rollout.episodes import EpisodeCounts
from areal_x.runtime import timeline
from areal_x.runtime.waits import waiting, whose
from areal_x.shards.messages import News, Opened
from areal_x.types import Group


class Remote(Protocol):
    """The process of a shard, seen from the driver. Its methods may be called from any thread."""

    @property
    def node(self) -> str:
        """The node's address."""
        ...

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Makes the process call a method of its Shard. The future raises UserError if the method
        raises, and ConnectionError as soon as the process is gone."""
        ...

    def end(self) -> None:
        """Kills the process. Safe to call twice."""
        ...


class Places(Protocol):
    """Room for shards, by their numbers."""

    async def keepers(self, number: int) -> Sequence[Remote]:
        """Returns the process of a shard, alone in a sequence; a new one if the last is gone, once
        there is room. Raises: UserError, ConnectionError."""
        ...


class Seat:
    """One of the shards, whichever process it is in.

    attempts: episodes of a group.
    """

    def __init__(self, number: int, attempts: int) -> None:
        self.number = number
        self.name = f"shard {number}"
        self.remote: Remote | None = None  # None while it is not ready
        self.concurrency = 0
        self.given: dict[int, tuple[Group, asyncio.Future[Any]]] = {}  # by ticket
        self.times = 0  # that it was opened
        self.failures = 0  # in a row, without a finished group
        self.metrics: dict[str, float] = {}
        self.doing = ""
        self._attempts = attempts
        self._sent = self._received = self._wanted = 0
        self._before = self._counts = EpisodeCounts()
        self._outbox: list[Group] = []
        self._span: timeline.Span | None = None

    @property
    def is_ready(self) -> bool:
        return self.remote is not None

    @property
    def counts(self) -> EpisodeCounts:
        """Counts since the start of the run, over all its processes."""
        return self._before + self._counts

    @property
    def wanted(self) -> int:
        """Engine slots that its episodes want: as it last reported, and of groups on their way."""
        return self._wanted + (self._sent - self._received) * self._attempts

    @property
    def load(self) -> float:
        return self.wanted / max(self.concurrency, 1)

    def ready(self, remote: Remote, opened: Opened) -> None:
        """The shard may be given groups."""
        self.remote, self.concurrency = remote, opened.concurrency
        self._sent = self._received = self._wanted = 0

    def give(self, group: Group, done: asyncio.Future[Any]) -> None:
        """Gives the shard a group, whose episodes `done` receives. Groups that are given in the
        same turn of the loop travel together."""
        self.given[group.ticket] = group, done
        self._sent += 1
        self._busy(True)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(group)

    def heard(self, news: News) -> None:
        """Takes over the state of the shard."""
        self._received, self._wanted = news.received, news.wanted
        self.concurrency, self._counts = news.concurrency, news.counts
        self.metrics, self.doing = dict(news.metrics), news.doing
        if news.finished:
            self.failures = 0
        for finished in news.finished:
            _, done = self.given.pop(finished.ticket)
            if not done.done():
                done.set_result(finished)
        self._busy(self.wanted > 0)

    def lost(self) -> list[tuple[Group, asyncio.Future[Any]]]:
        """The process is gone, or of no use: ends it, and returns the groups that it had."""
        if self.remote is not None:
            self.remote.end()
        self.remote, self.concurrency = None, 0
        self._before, self._counts = self.counts, EpisodeCounts()
        self._sent = self._received = self._wanted = 0
        left, self.given = list(self.given.values()), {}
        self._outbox.clear()
        self._busy(False)
        return left

    async def call(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a call. Raises: as the future of Remote.call."""
        assert self.remote is not None
        return await result(self.remote, self.name, method, *arguments)

    def _send(self) -> None:
        if self._outbox and self.remote is not None:
            groups, self._outbox = self._outbox, []
            self.remote.call("give", groups)  # if it is gone, the call for news says so

    def _busy(self, busy: bool) -> None:
        """Keeps a span of the timeline open while the shard generates."""
        if busy and self._span is None:
            self._span = timeline.span("generate", shard=self.number)
            self._span.__enter__()
        elif not busy and self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


async def result(remote: Remote, name: str, method: str, *arguments: Any) -> Any:
    """Returns the result of a call to a shard's process."""
    idle = method == "news"
    with waiting(whose(), "a shard to answer", f"{method}, {name} on {remote.node}", idle=idle):
        return await asyncio.wrap_future(remote.call(method, *arguments))
