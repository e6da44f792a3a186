"""The engine of a rollout in shards, in the driver: stages weights once, and makes all shards load
them. What is generated is generated in the shards."""

from __future__ import annotations

import time
from typing import Any

from areal_x.engines.fleet.stager import Stager
from areal_x.engines.fleet.staging import CopiedWeights
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, Engine, Request
from areal_x.runtime.timeline import Interval
from areal_x.shards.seat import Seat
from areal_x.shards.shards import Shards

SECONDS_TO_ANSWER = 10.0  # for a shard that is asked for its spans


class ShardedEngine(Engine):
    """The servers of all shards. context: maximum length of a sequence in tokens."""

    def __init__(self, shards: Shards, stager: Stager, context: int) -> None:
        self.context, self.version = context, 0
        self._shards, self._stager = shards, stager

    @property
    def concurrency(self) -> int:  # type: ignore[override]
        return self._shards.concurrency

    async def start(self) -> None:
        try:
            self._stager.open()
            await self._shards.start()
        except BaseException:
            await self.close()
            raise
        self.context = min(self.context, self._shards.context)

    async def generate(self, request: Request) -> Completion:
        raise UserError("with cluster.shards, only the workflow's own episodes may generate")

    def stage(self, trainer: Any, version: int | None = None) -> CopiedWeights:
        return self._stager.stage(trainer, trainer.version if version is None else version)

    async def swap(self, staged: CopiedWeights) -> float:
        files = await self._stager.written(staged)
        paused = await self._shards.swap(files)
        self._stager.current, self.version = files, files.version
        self._stager.keep(files)  # each shard has its own links to those that its servers need
        return paused

    async def close(self) -> None:
        await self._shards.close()
        await self._stager.close()
        self._stager.remove_files()

    def balance(self, trainer_idle: float, rollout_idle: float) -> dict[str, float]:
        """Tells every shard, and returns the sums of their metrics, which are those of the step
        before."""
        ready = self._shards.ready
        for seat in ready:
            if seat.remote is not None:
                seat.remote.call("balance", trainer_idle, rollout_idle)
        names = {name for seat in ready for name in seat.metrics}
        return {
            name: sum(seat.metrics.get(name, 0.0) for seat in ready) for name in sorted(names)
        } | {"shards": len(ready)}

    async def join(self, url: str) -> None:
        """Adds a running server to the shard with the fewest slots."""
        await self._smallest().call("join", url)

    async def leave(self, url: str) -> None:
        """Removes a server from the shard that has it."""
        errors: list[UserError] = []
        for seat in self._shards.ready:
            try:
                await seat.call("leave", url)
            except UserError as error:
                errors.append(error)
            else:
                return
        raise errors[0] if errors else UserError("no shard is ready")

    def spans(self) -> list[tuple[str, Interval]]:
        """Returns the spans of all shards that have ended since the last time, for the run's
        timeline. Called from the trainer's thread; the spans of a shard that is lost, or silent for
        a while, are left out."""
        here, found = time.perf_counter() - time.time(), []
        asked = [
            (seat.name, seat.remote.call("spans"))
            for seat in self._shards.ready
            if seat.remote is not None
        ]
        for name, answer in asked:
            try:
                intervals: list[Interval] = answer.result(SECONDS_TO_ANSWER)
            except Exception:
                continue
            found += [(name, interval.shifted(here)) for interval in intervals]
        return found

    def _smallest(self) -> Seat:
        if not (ready := self._shards.ready):
            raise UserError("no shard is ready")
        return min(ready, key=lambda seat: seat.concurrency)
