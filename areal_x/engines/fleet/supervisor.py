"""The supervisor keeps servers serving: the shell around the fleet's decisions.

It starts and reaches servers, sends heartbeats, checks their log-probabilities before they serve,
and cancels calls to lost servers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32

from areal_x.engines.fleet.concurrency import Load, next_limit
from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.connections import OutOfFiles
from areal_x.engines.fleet.failures import ServerLost, WeightsDiffer
from areal_x.engines.fleet.fleet import Fleet, State
from areal_x.engines.fleet.probe import distance, outliers
from areal_x.engines.fleet.replica import Replica
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.runtime import background
from areal_x.runtime.waits import on_behalf_of, waiting, whose

T = TypeVar("T")
Scores = Float32[np.ndarray, " T"]
LEAST_SLEEP_SECONDS = 0.05
POLL_SECONDS = 1.0  # between two looks at the servers' processes
COMPARED_AT_ONCE = 32  # servers, with up to 31 requests each (Client.probe)
HAND_OVER_SECONDS = 15.0  # in which a server that leaves gives its requests back


@dataclass(eq=False)
class _Call:
    """A call to a server, made by a task that waits for it."""

    task: asyncio.Task[Any]
    wanted: Callable[[], bool]
    given_up: bool = False


class Supervisor:
    """The servers of an engine. All of it runs on the event loop that calls `bring_up`.

    prepare: prepares a responding server, without weights. load: loads the newest weights into it,
    and returns False if none were published. score: returns its log-probabilities of the probe
    prompt under the newest weights. changed: called whenever the fleet may have changed.
    """

    def __init__(
        self,
        config: FleetConfig,
        report: Callable[[str], None],
        prepare: Callable[[Replica], Awaitable[None]],
        load: Callable[[Replica], Awaitable[bool]],
        score: Callable[[Replica], Awaitable[Scores]],
        changed: Callable[[], None],
    ) -> None:
        self.fleet = Fleet(0, config.silence_seconds)
        self.replicas: dict[str, Replica] = {}
        self._config = config
        self._report = report
        self._prepare = prepare
        self._load_current = load
        self._score = score
        self._changed = changed
        self._calls: set[_Call] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # that bring a server
        self._watching: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        # log-probabilities of the probe prompt, with their version: the servers' and the trainer's
        self._consensus: tuple[int, Scores] | None = None
        self._reference: tuple[int, Scores] | None = None
        self._loads: dict[str, Load] = {}

    # ---- adding and removing servers

    def add(self, replica: Replica) -> None:
        self.replicas[replica.name] = replica
        limit = self._config.concurrency if self._config.adaptive else None
        self.fleet.join(replica.name, replica.ours, now(), limit)

    async def bring_up(self, name: str) -> None:
        """Starts or reaches a server that is due, loads the newest weights into it, checks it and
        lets it serve."""
        replica, fleet = self.replicas[name], self.fleet
        await replica.open(self._config.start_timeout_seconds, self._report)
        fleet.reached(name)
        await self._prepare(replica)
        while True:
            version = fleet.target
            try:
                if await self._load_current(replica):
                    await self._check(replica, version)
            except WeightsDiffer as error:
                self.failed(name, error)
                self.settle()
                raise
            except EngineError:
                if fleet.target == version:
                    raise
                continue  # the folder was removed while it was read, as there is a newer one
            if fleet.accepted(name, version, now()):
                return self.settle()

    def failed(self, name: str, error: EngineError) -> None:
        """A server does not have the weights that it was given: it is lost, or quarantined if it took
        others for them."""
        if isinstance(error, WeightsDiffer):
            self.fleet.quarantine(name, f"{error}", now())
        else:
            self.fleet.lost(name, f"{error}", now())

    async def still(self) -> None:
        """Returns when no server is being started or checked, after `Fleet.sleep`; ends those of ours
        that do not serve, as they may hold memory."""
        coming = [task for task in self._tasks.values() if not task.done()]
        if coming:
            with waiting(whose(), "servers that are being started", self._coming):
                await asyncio.wait(coming)
        for name, replica in self.replicas.items():
            if replica.ours and not self.fleet.serves(name) and not self.fleet.is_leaving(name):
                await replica.close()

    def wakes(self) -> None:
        """The servers are about to wake: those that were lost while they slept are started again."""
        if self.fleet.asleep:
            self.fleet.wake(now())
            self.wake()

    def _coming(self) -> str:
        return ", ".join(name for name, task in self._tasks.items() if not task.done())

    def watch(self) -> None:
        """Starts watching the servers in the background."""
        with on_behalf_of("the watch over servers", moves=False):
            self._watching = background.start(self._watch(), "the watch over the servers")

    async def remove(self, name: str) -> None:
        """Removes a server, after its requests went to others with their tokens so far, and ends it
        if it is ours. It may be ended as soon as this returns."""
        member = self.fleet.members.get(name)
        if member is None or self.fleet.is_leaving(name):
            return
        served = member.serves
        self.fleet.retire(name, now())
        self.settle()
        if name in self._tasks:
            await cancel_and_wait(self._tasks.pop(name))
        if served:
            await self._hand_over(name)
        self.fleet.leave(name, now())
        self.settle()
        replica = self.replicas[name]
        await replica.vacate()
        self.replicas.pop(name, None)

    async def _hand_over(self, name: str) -> None:
        """Returns when a leaving server has no requests any more. Those that it does not give back
        in time are generated anew."""
        member, client = self.fleet.members[name], self.replicas[name].client
        refused = suppress(EngineError, UserError, TimeoutError)
        with waiting(name, "its requests to be handed over"), refused:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while member.requests:  # also those that were on their way
                    await client.hand_over()
                    await asyncio.sleep(LEAST_SLEEP_SECONDS)

    async def close(self) -> None:
        """Ends everything but the servers' processes."""
        for task in (self._watching, self._comparing, *self._tasks.values()):
            if task is not None:
                await cancel_and_wait(task)
        self._watching = self._comparing = None
        self._tasks.clear()

    def settle(self) -> None:
        """Acts on the fleet's decisions."""
        for sentence in self.fleet.messages():
            self._report(sentence)
        for call in self._calls:
            if not call.given_up and not call.wanted():
                call.given_up = True
                call.task.cancel()
        self._changed()

    # ---- calls

    async def unless_lost(self, call: Coroutine[Any, Any, T], wanted: Callable[[], bool]) -> T:
        """Returns the call's result. Raises ServerLost as soon as the call is no longer wanted
        because its server was lost."""
        if not wanted():
            call.close()
            raise ServerLost("the server was lost before")
        task = asyncio.current_task()
        assert task is not None
        running = _Call(task, wanted)
        cancelled_before = task.cancelling()
        self._calls.add(running)
        try:
            return await call
        except asyncio.CancelledError:
            if running.given_up and task.cancelling() - 1 <= cancelled_before:
                raise ServerLost("the server was lost meanwhile") from None
            raise  # the caller's own cancellation
        finally:
            self._calls.remove(running)
            if running.given_up:  # else a time limit around the call would not know its own
                task.uncancel()

    def wake(self) -> None:
        """Checks the servers now, after a failure."""
        self._hurry.set()
        if self._watching is not None and self._watching.done():
            self._watching.result()  # raises what ended it

    # ---- watching servers

    async def _watch(self) -> None:
        while True:
            await self._check_alive()
            self.settle()
            sleep = self._config.heartbeat_seconds
            for name in self.fleet.due(now()):
                self._tasks[name] = background.start(
                    self._bring_up_again(name), f"bringing back {name}"
                )
            for name, member in self.fleet.members.items():
                busy = name in self._tasks and not self._tasks[name].done()
                if (
                    member.state is State.GIVEN_UP
                    and self.replicas[name].server is not None
                    and not busy
                ):
                    self._tasks[name] = background.start(
                        self.replicas[name].close(), f"closing {name}"
                    )
            retries = [
                m.retry_at - now()
                for m in self.fleet.members.values()
                if m.state is State.DOWN and not self.fleet.asleep
            ]
            until = now() + max(LEAST_SLEEP_SECONDS, min([sleep, *retries]))
            with waiting("the watch over servers", "the next heartbeat", idle=True):
                while now() < until and not self._dead():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(until - now(), POLL_SECONDS)):
                            await self._hurry.wait()
                            break
            self._hurry.clear()

    def _dead(self) -> dict[str, str]:
        """Returns the servers that should serve and whose processes have ended, with the causes."""
        causes = {name: self.replicas[name].cause_of_death() for name in self.fleet.serving()}
        return {name: cause for name, cause in causes.items() if cause is not None}

    async def _check_alive(self) -> None:
        for name, cause_of_death in self._dead().items():
            self.fleet.lost(name, cause_of_death, now())
        self.settle()
        await asyncio.gather(*(self._heartbeat(name) for name in self.fleet.serving()))

    async def _heartbeat(self, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is None:  # it left in this iteration of the event loop
            return
        try:
            answered = await replica.client.is_healthy(self._config.heartbeat_seconds)
        except OutOfFiles as error:  # this process's fault, not the server's
            self._report(f"{error}")
            return
        self.fleet.heartbeat(name, answered, now())
        if answered and self._config.adaptive:
            with suppress(EngineError):
                self._adapt(name, await replica.client.load_figures())

    def _adapt(self, name: str, load: Load | None) -> None:
        member = self.fleet.members.get(name)
        if load is None or member is None or member.limit is None:
            return
        before = self._loads.get(name, load)
        self._loads[name] = load
        limit = next_limit(member.limit, before, load, self._config.concurrency)
        self.fleet.set_limit(name, limit)

    async def _bring_up_again(self, name: str) -> None:
        try:
            with on_behalf_of(f"the return of {name}", moves=False):
                await self.bring_up(name)
        except Exception as error:  # the other servers go on
            self.fleet.lost(name, f"{error}" or type(error).__name__, now())
            self.settle()
            self._hurry.set()

    # ---- comparing servers

    async def _check(self, replica: Replica, version: int) -> None:
        """Quarantines the server and raises EngineError if its log-probabilities deviate from the
        trainer's or the other servers'."""
        expected = await self._expected(version)
        if expected is None and scores_at(self._reference, version) is None:
            return
        found = await self._score(replica)
        reason = self._drift_reason(found, version)
        if (
            reason is None
            and expected is not None
            and (gap := distance(found, expected)) > self._config.tolerance
        ):
            reason = self._describe("the others'", gap, "tolerance")
        if reason is not None and self.fleet.target == version:
            self.fleet.quarantine(replica.name, reason, now())
            raise EngineError(reason)

    def _drift_reason(self, found: Scores, version: int) -> str | None:
        """Returns why a server does not match what the trainer published, or None."""
        right = scores_at(self._reference, version)
        if right is None or (gap := distance(found, right)) <= self._config.drift:
            return None
        return self._describe("the trainer's", gap, "drift")

    async def _expected(self, version: int) -> Scores | None:
        if (agreed := scores_at(self._consensus, version)) is not None:
            return agreed
        for name, member in list(self.fleet.members.items()):
            if member.serves and member.version == version:
                with suppress(EngineError):
                    return await self._score(self.replicas[name])
        return None

    def _describe(self, whose: str, gap: float, setting: str) -> str:
        return (
            f"its log-probabilities of the probe prompt are {gap:.3g} nats per token from {whose}"
            f" ({self._config.binding}.{setting})"
        )

    async def pause_comparing(self) -> None:
        """Cancels the comparison before a swap, which would mix two versions in it."""
        if self._comparing is not None:
            await cancel_and_wait(self._comparing)

    def expect(self, version: int, scores: Scores | None) -> None:
        """Sets the trainer's log-probabilities of the probe prompt at a version; None if they are
        unknown."""
        self._reference = None if scores is None else (version, scores)

    def compare(self) -> None:
        """Compares, in the background, the servers' log-probabilities of the probe prompt with the
        trainer's and with each other's, and keeps them for servers that return. All servers have
        one version now."""
        self._comparing = background.start(
            self._compare(self.fleet.target), "the comparison of the servers"
        )

    async def _compare(self, version: int) -> None:
        names = [
            name for name, m in self.fleet.members.items() if m.serves and m.version == version
        ]
        turns = asyncio.Semaphore(COMPARED_AT_ONCE)

        async def scored(name: str) -> Scores:
            async with turns:
                return await self._score(self.replicas[name])

        answers = await asyncio.gather(*map(scored, names), return_exceptions=True)
        scores = {
            name: x
            for name, x in zip(names, answers, strict=True)
            if not isinstance(x, BaseException)
        }
        if not scores or self.fleet.target != version:
            return
        far = {
            name: reason
            for name, found in scores.items()
            if (reason := self._drift_reason(found, version)) is not None
        }
        near = {name: found for name, found in scores.items() if name not in far}
        for name, gap in outliers(near, self._config.tolerance).items():
            far[name] = self._describe("most others'", gap, "tolerance")
            del near[name]
        for name, reason in far.items():
            self.fleet.quarantine(name, reason, now())
        rest = [np.asarray(found, np.float32) for found in near.values()]
        widest = max((distance(rest[0], found) for found in rest), default=0.0)
        if widest > self._config.tolerance:
            differ = f"{', '.join(near)} differ by {widest:.3g} nats per token on the probe prompt"
            self._report(f"{differ}, and there is no majority to tell which is right")
        elif rest:
            self._consensus = version, np.median(np.stack(rest), axis=0)
        self.settle()


def scores_at(scores: tuple[int, Scores] | None, version: int) -> Scores | None:
    """Returns the recorded scores if they belong to this version."""
    return scores[1] if scores is not None and scores[0] == version else None


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended, whatever its outcome."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def now() -> float:
    return time.monotonic()
