"""Base of the injected stalls: each begins a wait that does not end, expects the report that names it, and lets it end."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from areal_x.runtime.waits import FILE, on_behalf_of, waiting

EPISODE = "group 3, episode 1 (task t)"
EPISODE_PATTERN = re.escape(EPISODE)
STALLS: dict[str, Callable[[Stall], Awaitable[None]]] = {}


@dataclass
class Stall:
    """A stalled wait. folder: for files and the log of waits. name: of the wait. request: for fixtures."""

    folder: Path
    name: str
    request: pytest.FixtureRequest
    heard: SimpleQueue[str] = field(default_factory=SimpleQueue)
    named: bool = False
    gate: threading.Event = field(default_factory=threading.Event)  # stalled functions wait for it

    async def said(self, who: str, what: str = "") -> None:
        """Waits until a report names the wait. who, what: patterns; `what` matches the beginning of the wait's name."""
        pattern = re.compile(rf"{who} has waited (?:\d+ s for [^;]*, of these )?\d+ s for {what or re.escape(self.name)}")
        await asyncio.to_thread(self._said, pattern)

    async def idle(self, who: str, what: str = "") -> None:
        """As `said`, for a wait for something to do, which is reported only beside another one."""
        with waiting("somebody else", "something else"):
            await self.said(who, what)

    def _said(self, pattern: re.Pattern[str]) -> None:
        said: list[str] = []
        until = time.monotonic() + 240  # a machine may be busy importing
        while not self.named:
            try:
                said.append(self.heard.get(timeout=max(until - time.monotonic(), 0)))
            except Empty:
                pytest.fail(f"no report matches {pattern.pattern!r}:\n" + "\n".join(said))
            shown = said[-1] if "more wait, see" not in said[-1] else (self.folder / FILE).read_text()
            self.named = bool(pattern.search(shown))

    def hold(self, *_: Any, **__: Any) -> None:
        """Blocks a thread until `release`."""
        assert self.gate.wait(300)

    async def held(self, *_: Any, **__: Any) -> None:
        """Blocks a coroutine until `release`."""
        await asyncio.to_thread(self.hold)

    def release(self) -> None:
        self.gate.set()

    async def for_episode(self, work: Awaitable[Any], detail: str = "", who: str = EPISODE) -> Any:
        """Runs stalling work of an episode, expects its report, releases it, and returns its result."""
        return await self.through(work, re.escape(who), f"{re.escape(self.name)}{detail}")

    async def through(self, work: Awaitable[Any], who: str, what: str = "") -> Any:
        with on_behalf_of(EPISODE):
            task = asyncio.ensure_future(work)
        try:
            await self.said(who, what)
        finally:
            self.release()
        return await task

    async def threaded(self, function: Callable[..., Any], who: str, what: str = "") -> Any:
        return await self.through(asyncio.to_thread(function), who, what)


def stall(name: str) -> Callable[[Callable[[Stall], Awaitable[None]]], Callable[[Stall], Awaitable[None]]]:
    """Registers a function that injects a stall into the waits of this name."""

    def register(inject: Callable[[Stall], Awaitable[None]]) -> Callable[[Stall], Awaitable[None]]:
        assert name not in STALLS, name
        STALLS[name] = inject
        return inject

    return register
