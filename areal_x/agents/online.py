"""Online training: people and programs open sessions when they like, and give rewards when they
have them.

    train.dataset = @online_tasks()
    train.workflow = @online()

The run serves; each session that a client opens (areal_x.agents.session, POST /sessions) is one
episode of a group that waits for it, and an optimizer step is taken when its groups are full.
Weights change under conversations that are still in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.client import ADDRESS
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway_workflow import GatewayWorkflow
from areal_x.errors import at_least, positive
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Task, TimedOut


@gin.configurable("online_tasks")
def online_tasks(count: int = 1 << 16) -> Sequence[Task]:
    """Returns placeholders for groups, in the order in which they are admitted; each agent brings
    its own task.

    Args:
        count: Groups in an epoch.
    """
    at_least("online_tasks.count", count, 1)
    return PlaceholderTasks(count)


@dataclass(frozen=True)
class PlaceholderTasks(Sequence[Task]):
    """Tasks without content, computed on access."""

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
    """An episode that waits for a client. group: episodes that are compared with each other share
    it. taken: resolves to the session, or to None if no client came in time."""

    group: str
    engine: Generator
    taken: asyncio.Future[GatewaySession | None]


class EpisodeSlots:
    """Matches clients with episodes that wait for one. Knows no socket.

    A label keeps sessions together: sessions with the same label are episodes of one group, as
    attempts at one task should be. A session without a label takes the first free slot of an
    unlabelled group.
    """

    def __init__(self) -> None:
        self._free: list[EpisodeSlot] = []
        self._labels: dict[str, str] = {}  # by group, if it has one
        self._begun: set[str] = set()  # groups that a session without a label has joined
        # groups whose free slots are about to close
        self._closing: dict[str, asyncio.TimerHandle] = {}

    def wait(self, slot: EpisodeSlot) -> None:
        self._free.append(slot)

    def leave(self, slot: EpisodeSlot) -> None:
        """Withdraws a slot; a group without slots is forgotten."""
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
        """Closes the group's slots that no client has taken after this many seconds, counted from
        the first call."""
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
        """Returns the slot for a client that asks with this label, or None if there is none."""
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
    """Episodes that clients start, and end with a reward, when they like.

    A session that nobody uses for limits.idle_seconds, or that ends without a reward, is counted,
    and its place is free for the next. A group may wait for its first session without limit:
    train.episode_seconds and train.failed_groups do not apply.
    """

    open_ended = True  # clients decide how long an episode takes

    address_file: str = ADDRESS
    """File to which the gateway's address and key are written, readable by this user alone, once it
    serves."""
    group_seconds: float = 600.0
    """How long, after the first session of a group ended, its remaining slots wait for more
    sessions of the same label; then the group continues with the sessions that it has."""
    slots: EpisodeSlots = field(default_factory=EpisodeSlots)

    def __post_init__(self) -> None:
        positive("online.group_seconds", self.group_seconds)

    def setup(self, tokenizer: Any) -> Any:
        ready = super().setup(tokenizer)
        ready = replace(ready, slots=EpisodeSlots())
        ready.gateway.on_open = ready.opened
        return ready

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        await self.lazy_gateway().start(Path(self.address_file))
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

    async def opened(self, label: str | None) -> GatewaySession | None:
        """Returns the session of a client that asks the gateway for one, or None if no episode
        waits."""
        slot = self.slots.take(label)
        if slot is None:
            return None
        session = await self.open(slot.engine)
        if slot.taken.done():  # the run ended meanwhile
            session.close()
            return None
        slot.taken.set_result(session)
        return session
