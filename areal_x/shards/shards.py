"""The shards of a run: opens them, hears from them, gives them groups, and opens a lost one again.

    place(group) ──▶ the least busy shard that is ready ──▶ its episodes
                         │ lost
                         └──▶ its groups go to the others, with the seeds that they had, and it is opened
                              again, with the newest weights

All of it belongs to the rollout's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from areal_x.errors import EngineError, UserError
from areal_x.rollout.episodes import EpisodeCounts
from areal_x.runtime import background
from areal_x.runtime.loop import together
from areal_x.runtime.waits import on_behalf_of, waiting
from areal_x.shards.messages import News
from areal_x.shards.seat import Places, Remote, Seat, result
from areal_x.types import Group

TRIES = 5  # that a shard may be lost, or opened in vain, without a finished group
SILENT_SECONDS = 120.0  # without news, which come every two seconds: a process that hangs is lost
LOOK_SECONDS = 0.1  # between looks for a shard in place of lost ones
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0


class Shards:
    """The shards.

    places: where their processes are. attempts: episodes of a group. message: shows a sentence to
    the user. changed: called when there may be room for another group.
    """

    def __init__(
        self, count: int, attempts: int, places: Places, message: Callable[[str], None]
    ) -> None:
        self.seats = [Seat(number, attempts) for number in range(count)]
        self.changed: Callable[[], None] = lambda: None
        self.context = 0
        self._attempts, self._places, self._message = attempts, places, message
        self._current: Any = None  # the staged weights that a shard must load before it is ready
        self._weights = asyncio.Lock()  # held while weights are swapped
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Group, asyncio.Future[Any]]] = deque()  # while none is ready

    @property
    def ready(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.is_ready]

    @property
    def concurrency(self) -> int:
        return sum(seat.concurrency for seat in self.seats)

    @property
    def wanted(self) -> int:
        """Engine slots that all groups want that were placed and are not finished."""
        return sum(seat.wanted for seat in self.seats) + len(self._waiting) * self._attempts

    def counts(self) -> EpisodeCounts:
        return sum((seat.counts for seat in self.seats), EpisodeCounts())

    # ---- start and end

    async def start(self) -> None:
        """Opens all shards. Raises: UserError if one cannot be opened."""
        try:
            await together(self._open(seat) for seat in self.seats)
        except ConnectionError as error:
            raise UserError(f"{error}") from error

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_SECONDS):
                closing = (seat.call("close") for seat in self.ready)
                await asyncio.gather(*closing, return_exceptions=True)
        for seat in self.seats:
            seat.lost()

    # ---- groups

    def place(self, group: Group, done: asyncio.Future[Any]) -> None:
        """Gives a group to the least busy shard, or to the first that becomes ready. done: receives
        its Finished, whichever shards are lost meanwhile."""
        ready = self.ready
        if ready:
            min(ready, key=lambda seat: seat.load).give(group, done)
        else:
            self._waiting.append((group, done))

    def seat_of(self, ticket: int) -> Seat | None:
        """Returns the shard that has a group."""
        return next((seat for seat in self.seats if ticket in seat.given), None)

    async def some_ready(self) -> list[Seat]:
        """Returns the shards that are ready, once there are any."""
        if not self.ready:
            with waiting("the rollout", "a shard to be opened again"):
                while not self.ready:
                    await asyncio.sleep(LOOK_SECONDS)
        return self.ready

    # ---- weights

    async def swap(self, staged: Any) -> float:
        """Makes staged weights current in all shards, and returns the longest pause. Raises:
        UserError if one cannot load them."""
        async with self._weights:
            self._current = staged
            paused = await asyncio.gather(
                *(seat.call("swap", staged) for seat in self.ready), return_exceptions=True
            )
        errors = [x for x in paused if isinstance(x, BaseException)]
        for error in errors:
            if not isinstance(error, ConnectionError):  # a lost one is opened again, with them
                raise error
        return max((x for x in paused if isinstance(x, float)), default=0.0)

    # ---- each shard

    async def _open(self, seat: Seat) -> None:
        """Opens a shard in a process of its own, gives it the newest weights, and hears from it from
        then on."""
        (remote,) = await self._places.keepers(seat.number)
        try:
            seat.times += 1
            opened = await result(remote, seat.name, "open", seat.number, seat.times - 1)
            async with self._weights:
                if self._current is not None:
                    await result(remote, seat.name, "swap", self._current)
                seat.ready(remote, opened)
        except BaseException:
            remote.end()  # with all that it has begun
            raise
        self.context = min(self.context or opened.context, opened.context)
        self._start(self._hear(seat, remote), f"the news of {seat.name}")
        while self._waiting:
            self.place(*self._waiting.popleft())
        self.changed()

    async def _hear(self, seat: Seat, remote: Remote) -> None:
        """Takes in the news of a shard, until it is lost. Raises: UserError, EngineError, which end
        the run."""
        reason = ""
        while not reason:
            try:
                with on_behalf_of(seat.name, moves=False):
                    async with asyncio.timeout(SILENT_SECONDS):
                        news: News = await seat.call("news")
            except ConnectionError as error:
                reason = f"{error}"
                break
            except TimeoutError:
                reason = f"it was silent for {SILENT_SECONDS:g} s"
                break
            seat.heard(news)
            for sentence in news.messages:
                self._message(sentence)
            if news.mistake:
                raise UserError(news.mistake)
            reason = news.lost
            self.changed()
        left = seat.lost()
        self._message(
            f"{seat.name} is lost ({reason}): its groups go to others, and it is opened again"
        )
        for group, done in left:
            self.place(group, done)
        self.changed()
        self._start(self._open_again(seat, reason), f"the return of {seat.name}")

    async def _open_again(self, seat: Seat, reason: str) -> None:
        while True:
            seat.failures += 1
            if seat.failures > TRIES:
                raise EngineError(f"{seat.name} was lost {TRIES} times in a row: {reason}")
            wait = FIRST_RETRY_SECONDS * 2 ** (seat.failures - 1)
            await asyncio.sleep(min(wait, LONGEST_RETRY_SECONDS))
            try:
                with on_behalf_of(seat.name, moves=False):
                    await self._open(seat)
            except (ConnectionError, UserError) as error:
                reason = f"{error}"
            else:
                return self._message(f"{seat.name} is there again")

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = background.start(work, what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
