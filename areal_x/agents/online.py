"""Learning from whoever comes: people and programs that open sessions, and give them rewards when
they have some.

    train.dataset = @online_tasks()
    train.workflow = @online()

The run serves; each session that somebody opens (areal_x.agents.session, POST /sessions) is one
episode of a group that waits for it, and a step is trained when its groups are full. Weights change
under conversations that go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.client import ADDRESS
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway_workflow import GatewayWorkflow, documented
from areal_x.errors import at_least, positive
from areal_x.protocols.workflow import Generator, Result
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Task, TimedOut


@gin.configurable("online_tasks")
def online_tasks(count: int = 1 << 16) -> Sequence[Task]:
    """Places for groups in the order in which they are admitted; an agent brings its task with it.
    count: of an epoch."""
    at_least("online_tasks.count", count, 1)
    return PlaceholderTasks(count)


@dataclass(frozen=True)
class PlaceholderTasks(Sequence[Task]):
    """Tasks that nobody reads, none of which is held in memory."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return Task(f"place-{index % self.size}", "")


@dataclass(eq=False)
class EpisodeSlot:
    """An episode that waits for somebody. group: those that are compared with each other have the
    same. taken: None where nobody came in time."""

    group: str
    engine: Generator
    taken: asyncio.Future[GatewaySession | None]


class EpisodeSlots:
    """Who waits for whom. Knows no socket.

    A label keeps sessions together: those that have the same are episodes of one group, as attempts
    at one task should be. A session without one takes the first free seat of a group that has no
    label.
    """

    def __init__(self) -> None:
        self._free: list[EpisodeSlot] = []
        self._labels: dict[str, str] = {}  # of the groups that have one
        self._begun: set[str] = set()  # groups that somebody without a label has joined
        # groups whose free seats wait only so long
        self._closing: dict[str, asyncio.TimerHandle] = {}

    def wait(self, slot: EpisodeSlot) -> None:
        self._free.append(slot)

    def leave(self, slot: EpisodeSlot) -> None:
        """It waits no more; a group without seats is forgotten."""
        if slot in self._free:
            self._free.remove(slot)
        if not any(other.group == slot.group for other in self._free):
            self._labels = {
                group: label for group, label in self._labels.items() if group != slot.group
            }
            self._begun.discard(slot.group)
            if (timer := self._closing.pop(slot.group, None)) is not None:
                timer.cancel()

    def close_after(self, group: str, seconds: float) -> None:
        """Gives up the seats of the group that nobody has taken by then; counted from the first
        call."""
        if group not in self._closing and any(slot.group == group for slot in self._free):
            self._closing[group] = asyncio.get_running_loop().call_later(
                seconds, self._close, group
            )

    def _close(self, group: str) -> None:
        for slot in [slot for slot in self._free if slot.group == group]:
            self.leave(slot)
            if not slot.taken.done():
                slot.taken.set_result(None)

    def take(self, label: str | None) -> EpisodeSlot | None:
        """The seat of whoever comes, None where there is none for them."""
        slot = next(
            (
                slot
                for slot in self._free
                if self._labels.get(slot.group) == label and self._fits(slot, label)
            ),
            None,
        )
        if slot is None and label is not None:
            slot = next(
                (
                    s
                    for s in self._free
                    if s.group not in self._labels and s.group not in self._begun
                ),
                None,
            )
        if slot is None:
            return None
        if label is None:
            self._begun.add(slot.group)
        else:
            self._labels[slot.group] = label
        self.leave(slot)
        return slot

    def _fits(self, slot: EpisodeSlot, label: str | None) -> bool:
        return label is not None or slot.group not in self._labels


@gin.configurable("online", denylist=["host", "slots"])
@dataclass(frozen=True, kw_only=True)
class Online(GatewayWorkflow):
    """Episodes that somebody else begins, and ends with a reward, when they like.

    address_file: where the gateway's address and key are written, for this user alone, once it
    serves. A session that nobody touches for limits.idle_seconds, or that has no reward in its end,
    is counted and gives its place to the next. A group may wait for its first session as long as it
    takes: train.episode_seconds and train.failed_groups do not count here. group_seconds: how long,
    after the first session of a group ended, its places that nobody took wait for the others of its
    label; then the group goes on with the sessions that it has.
    """

    __doc__ = documented(__doc__, GatewayWorkflow.__doc__)

    open_ended = True  # for the runner: how long an episode takes is others' to say

    address_file: str = ADDRESS
    group_seconds: float = 600.0
    slots: EpisodeSlots = field(default_factory=EpisodeSlots)

    def __post_init__(self) -> None:
        positive("online.group_seconds", self.group_seconds)

    def setup(self, tokenizer: Any) -> Any:
        ready = super().setup(tokenizer)
        ready = replace(ready, slots=EpisodeSlots())
        ready.gateway.on_open = ready.opened
        return ready

    async def run(self, task: Task, engine: Generator) -> Result:
        await self.serve()
        slot = EpisodeSlot(task.id, engine, asyncio.get_running_loop().create_future())
        self.slots.wait(slot)
        try:
            with waiting(whose(), "somebody to open a session", idle=True):
                session = await slot.taken
        finally:
            self.slots.leave(slot)
        if session is None:
            return TimedOut(self.group_seconds)
        with session:
            outcome = await session.ended()
            self.slots.close_after(task.id, self.group_seconds)
            return await self.episode(session, outcome)

    async def serve(self) -> None:
        host = self.lazy_gateway()
        if await host.start():
            write_address(Path(self.address_file), host.gateway.url, host.gateway.key)

    async def opened(self, label: str | None) -> GatewaySession | None:
        """For the gateway: the session of whoever asks for one."""
        slot = self.slots.take(label)
        if slot is None:
            return None
        session = await self.open(slot.engine)
        if slot.taken.done():  # the run ended meanwhile
            session.close()
            return None
        slot.taken.set_result(session)
        return session


def write_address(file: Path, url: str, key: str) -> None:
    """Readable by this user alone, from its first byte."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump({"url": url, "key": key}, out)
    new.replace(file)
