"""Time limits of episodes, whose clocks stop while the engine sleeps: an episode in flight then waits for
the trainer, and not for its own work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TimeLimits:
    """All of it belongs to one event loop."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}  # seconds of those in use, when last stopped
        self._stopped = False

    @asynccontextmanager
    async def limited(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Ends the body with a TimeoutError once it has had these seconds; None for no limit."""
        async with asyncio.timeout(None) as limit:
            if seconds is not None:
                self._left[limit] = seconds
                if not self._stopped:
                    limit.reschedule(now() + seconds)
            try:
                yield limit
            finally:
                self._left.pop(limit, None)

    def stop(self) -> None:
        """Stops all clocks until `go_on`, and those of limits that begin meanwhile."""
        if self._stopped:
            return
        self._stopped = True
        for limit in self._left:
            until = limit.when()
            if until is not None and not limit.expired():
                self._left[limit] = until - now()
                limit.reschedule(None)

    def go_on(self) -> None:
        if not self._stopped:
            return
        self._stopped = False
        for limit, left in self._left.items():
            if not limit.expired():
                limit.reschedule(now() + left)


def now() -> float:
    return asyncio.get_running_loop().time()
