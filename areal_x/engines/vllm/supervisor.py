"""Keeps servers serving: the shell around the fleet's decisions.

It starts and reaches servers, listens to their heartbeats, checks what they say before they serve,
and ends the calls to those that are lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32

from areal_x.engines.vllm.concurrency import Load, next_limit, parse_load
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.connections import OutOfFiles
from areal_x.engines.vllm.failures import ServerLost
from areal_x.engines.vllm.fleet import Fleet, State
from areal_x.engines.vllm.probe import distance, outliers
from areal_x.engines.vllm.replica import Replica
from areal_x.protocols.engine import EngineError
from areal_x.runtime import background
from areal_x.runtime.waits import on_behalf_of, waiting

T = TypeVar("T")
Scores = Float32[np.ndarray, " T"]
LEAST_SLEEP_SECONDS = 0.05


class Supervisor:
    """The servers of an engine. All of it runs on the event loop that calls `bring_up`.

    prepare: readies a server that answers, without weights. give: makes it hold the newest weights,
    if any were published. score: what a server says of the known prompt under the newest weights.
    changed: told whenever the fleet may have changed.
    """

    def __init__(
        self,
        config: VLLMConfig,
        report: Callable[[str], None],
        prepare: Callable[[Replica], Awaitable[None]],
        load: Callable[[Replica], Awaitable[bool]],
        score: Callable[[Replica], Awaitable[Scores]],
        changed: Callable[[], None],
    ) -> None:
        self.fleet = Fleet(0, config.silence_seconds)
        self.replicas: dict[str, Replica] = {}
        self._config, self._report = config, report
        self._prepare, self._load_current, self._score, self._changed = (
            prepare,
            load,
            score,
            changed,
        )
        self._calls: dict[asyncio.Task[Any], Callable[[], bool]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # that bring a server
        self._watching: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        # what servers say of the known prompt, and at which version
        self._consensus: tuple[int, Scores] | None = None
        self._reference: tuple[int, Scores] | None = None  # what the trainer says of it
        self._loads: dict[str, Load] = {}

    # ---- coming and going

    def add(self, replica: Replica) -> None:
        self.replicas[replica.name] = replica
        limit = self._config.concurrency if self._config.adaptive else None
        self.fleet.join(replica.name, replica.ours, now(), limit)

    async def bring_up(self, name: str) -> None:
        """Starts or reaches a server that is due, gives it the newest weights, checks it and lets
        it serve."""
        replica, fleet = self.replicas[name], self.fleet
        await replica.open(self._config.start_timeout_seconds, self._report)
        fleet.reached(name)
        await self._prepare(replica)
        while True:
            version = fleet.target
            try:
                if await self._load_current(replica):
                    await self._check(replica, version)
            except EngineError:
                if fleet.target == version:
                    raise
                continue  # the folder that it read was let go of, as a newer one is there
            if fleet.accepted(name, version, now()):
                return self.settle()

    def watch(self) -> None:
        """From now on servers are looked after in the background."""
        with on_behalf_of("the watch over servers", moves=False):
            self._watching = background.start(self._watch(), "the watch over the vLLM servers")

    async def remove(self, name: str) -> None:
        """The server takes part no more; its requests go to others."""
        self.fleet.leave(name, now())
        self.settle()
        if name in self._tasks:
            await cancel_and_wait(self._tasks.pop(name))
        await self.replicas.pop(name).close()

    async def close(self) -> None:
        """Ends everything but the servers' processes."""
        for task in (self._watching, self._comparing, *self._tasks.values()):
            if task is not None:
                await cancel_and_wait(task)
        self._watching = self._comparing = None
        self._tasks.clear()

    def settle(self) -> None:
        """Acts on what the fleet has decided."""
        for sentence in self.fleet.messages():
            self._report(sentence)
        for call, wanted in self._calls.items():
            if not wanted():
                call.cancel()
        self._changed()

    # ---- calls

    async def unless_lost(self, call: Coroutine[Any, Any, T], wanted: Callable[[], bool]) -> T:
        """The call's result. Raises ServerLost as soon as it is no longer wanted, as its server was
        lost."""
        if not wanted():
            call.close()
            raise ServerLost("the server was lost before")
        task = asyncio.create_task(call)
        self._calls[task] = wanted
        try:
            await asyncio.wait([task])
        finally:
            del self._calls[task]
            if not task.done():
                await cancel_and_wait(task)
        if task.cancelled():
            raise ServerLost("the server was lost meanwhile")
        return task.result()

    def wake(self) -> None:
        """Something failed: the servers are looked at now."""
        self._hurry.set()
        if self._watching is not None and self._watching.done():
            self._watching.result()  # raises what ended it

    # ---- looking after them

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
                m.retry_at - now() for m in self.fleet.members.values() if m.state is State.DOWN
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(LEAST_SLEEP_SECONDS, min([sleep, *retries]))):
                    with waiting("the watch over servers", "the next heartbeat", idle=True):
                        await self._hurry.wait()
            self._hurry.clear()

    async def _check_alive(self) -> None:
        for name in self.fleet.serving():
            if (cause_of_death := self.replicas[name].cause_of_death()) is not None:
                self.fleet.lost(name, cause_of_death, now())
        self.settle()
        await asyncio.gather(*(self._heartbeat(name) for name in self.fleet.serving()))

    async def _heartbeat(self, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is None:  # it left in this turn of the loop
            return
        try:
            answered = await replica.client.is_healthy(self._config.heartbeat_seconds)
        except OutOfFiles as error:  # ours, not the server's
            self._report(f"{error}")
            return
        self.fleet.heartbeat(name, answered, now())
        if answered and self._config.adaptive:
            with suppress(EngineError):
                self._adapt(name, parse_load(await replica.client.metrics()))

    def _adapt(self, name: str, load: Load | None) -> None:
        member = self.fleet.members.get(name)
        if load is None or member is None or member.limit is None:
            return
        before = self._loads.get(name, load)
        self._loads[name] = load
        member.limit = next_limit(member.limit, before, load, self._config.concurrency)

    async def _bring_up_again(self, name: str) -> None:
        try:
            with on_behalf_of(f"the return of {name}", moves=False):
                await self.bring_up(name)
        except Exception as error:  # whatever it was, the others go on
            self.fleet.lost(name, f"{error}" or type(error).__name__, now())
            self.settle()
            self._hurry.set()

    # ---- whether they say the same

    async def _check(self, replica: Replica, version: int) -> None:
        """Raises EngineError, and the server is quarantined, when it says something else than the
        trainer or the others."""
        expected = await self._expected(version)
        if expected is None and scores_at(self._reference, version) is None:
            return
        said = await self._score(replica)
        reason = self._drift_reason(said, version)
        if (
            reason is None
            and expected is not None
            and (gap := distance(said, expected)) > self._config.tolerance
        ):
            reason = describe_gap("the others'", gap, "tolerance")
        if reason is not None and self.fleet.target == version:
            self.fleet.quarantine(replica.name, reason, now())
            raise EngineError(reason)

    def _drift_reason(self, said: Scores, version: int) -> str | None:
        """Why a server is not what the trainer published, if it is not."""
        right = scores_at(self._reference, version)
        if right is None or (gap := distance(said, right)) <= self._config.drift:
            return None
        return describe_gap("the trainer's", gap, "drift")

    async def _expected(self, version: int) -> Scores | None:
        if (agreed := scores_at(self._consensus, version)) is not None:
            return agreed
        for name, member in list(self.fleet.members.items()):
            if member.serves and member.version == version:
                with suppress(EngineError):
                    return await self._score(self.replicas[name])
        return None

    async def pause_comparing(self) -> None:
        """Before a swap, which would mix two versions in one comparison."""
        if self._comparing is not None:
            await cancel_and_wait(self._comparing)

    def expect(self, version: int, said: Scores | None) -> None:
        """What the trainer says of the known prompt at a version, where that is known."""
        self._reference = None if said is None else (version, said)

    def compare(self) -> None:
        """All servers hold one version now: what they say of the known prompt is compared in the
        background, with the trainer's words and with each other's, and kept for those that come
        back."""
        self._comparing = background.start(
            self._compare(self.fleet.target), "the comparison of the vLLM servers"
        )

    async def _compare(self, version: int) -> None:
        names = [
            name for name, m in self.fleet.members.items() if m.serves and m.version == version
        ]
        said = await asyncio.gather(
            *(self._score(self.replicas[name]) for name in names), return_exceptions=True
        )
        scores = {
            name: x for name, x in zip(names, said, strict=True) if not isinstance(x, BaseException)
        }
        if not scores or self.fleet.target != version:
            return
        far = {
            name: reason
            for name, said in scores.items()
            if (reason := self._drift_reason(said, version)) is not None
        }
        near = {name: said for name, said in scores.items() if name not in far}
        for name, gap in outliers(near, self._config.tolerance).items():
            far[name] = describe_gap("most others'", gap, "tolerance")
            del near[name]
        for name, reason in far.items():
            self.fleet.quarantine(name, reason, now())
        rest = [np.asarray(said, np.float32) for said in near.values()]
        widest = max((distance(rest[0], said) for said in rest), default=0.0)
        if widest > self._config.tolerance:
            differ = f"{', '.join(near)} differ by {widest:.3g} nats a token on a known prompt"
            self._report(f"{differ}, and no majority says who is right")
        elif rest:
            self._consensus = version, np.median(np.stack(rest), axis=0)
        self.settle()


def scores_at(scores: tuple[int, Scores] | None, version: int) -> Scores | None:
    """Those that were noted, where they are of this version."""
    return scores[1] if scores is not None and scores[0] == version else None


def describe_gap(whose: str, gap: float, setting: str) -> str:
    return (
        f"its log-probabilities of a known prompt are {gap:.3g} nats a token from {whose}"
        f" (vllm.{setting})"
    )


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended, whatever comes of it."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def now() -> float:
    return time.monotonic()
