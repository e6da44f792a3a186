"""Sessions' records as the routes reach them from a worker process: over its channel to the process
of the run, which `workers.Worker` answers.

What only this process reads (a reply's text and tokens, a conversation) is encoded here, and kept
there as bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_x.agents.chat.prompts import CachedReply
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway import wire
from areal_x.agents.gateway.channel import Channel
from areal_x.agents.gateway.exchange import CallAnswer, RequestedSampling
from areal_x.agents.gateway.retries import Attempt, Client, SentAnswer
from areal_x.agents.gateway.session import StoredResponse
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.gateway.work import Assignment, WorkAnswer, WorkOver
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tasks.text_length import estimate_characters
from areal_x.types import Message

MOST_CHECKED = 256  # sessions whose valid schemas are remembered


class RemoteHost:
    """The gateway over the channel (record.Host)."""

    def __init__(self, channel: Channel, renderer: Renderer, beat_seconds: float) -> None:
        self.beat_seconds = beat_seconds
        self._channel = channel
        self._renderer = renderer
        self._schemas: OrderedDict[str, CheckedSchemas] = OrderedDict()

    async def find(self, name: str | None, keys: list[str]) -> RemoteRecord:
        id, limits, context = await self._channel.call("find", name, keys)
        schemas = self._checked(id)
        return RemoteRecord(self._channel, id, limits, context, self._renderer, schemas)

    async def admit(self, keys: list[str]) -> None:
        await self._channel.call("admit", keys)

    async def open_session(self, keys: list[str], label: str | None) -> dict[str, Any]:
        about: dict[str, Any] = await self._channel.call("open_session", keys, label)
        return about

    async def work_for(self, keys: list[str]) -> RemoteWork:
        await self._channel.call("admit_worker", keys)
        return RemoteWork(self._channel, keys)

    def _checked(self, id: str) -> CheckedSchemas:
        found = self._schemas.setdefault(id, CheckedSchemas())
        self._schemas.move_to_end(id)
        if len(self._schemas) > MOST_CHECKED:
            self._schemas.popitem(last=False)
        return found


@dataclass(frozen=True)
class RemoteRecord:
    """The record of a session over the channel (record.Record)."""

    channel: Channel
    id: str
    limits: SessionLimits
    context: int
    renderer: Renderer
    schemas: CheckedSchemas

    @property
    def memory(self) -> RemoteMemory:
        return RemoteMemory(self.channel, self.id)

    async def find_lost(self, attempt: Attempt, client: Client | None) -> SentAnswer | None:
        if not attempt.name and not attempt.number:  # no retry: see SentAnswers.find_lost
            return None
        found: SentAnswer | None = await self._call("find_lost", attempt, client)
        return found

    async def begin(
        self,
        ids: Sequence[str],
        attempt: Attempt,
        requested: RequestedSampling,
        ignored: frozenset[str],
    ) -> SamplingParams:
        chosen: SamplingParams = await self._call(
            "begin", list(ids), attempt, requested, sorted(ignored)
        )
        return chosen

    async def generate(self, id: str, request: Request) -> Completion:
        completion: Completion = await self._call("generate", id, request)
        return completion

    async def finish(
        self,
        answers: Sequence[CallAnswer],
        attempt: Attempt,
        client: Client | None,
        stored: StoredResponse | None,
    ) -> None:
        # prompts and completions are there already
        replies = [[one.id, one.answer.reply, one.answer.stopped_by] for one in answers]
        if stored is not None:
            size = estimate_characters(stored.conversation)
            conversation = await inline_or_in_pool(size, wire.dumps, list(stored.conversation))
            stored = StoredResponse(stored.id, stored.body, conversation)
        await self._call("finish", replies, attempt, client, stored)

    async def conversation(self, id: str) -> Sequence[Message] | None:
        found: bytes | None = await self._call("conversation", id)
        return None if found is None else await inline_or_in_pool(len(found), wire.loads, found)

    async def stored(self, id: str) -> bytes | None:
        found: bytes | None = await self._call("stored", id)
        return found

    async def forget(self, id: str) -> bool:
        return bool(await self._call("forget", id))

    async def reward(self, value: float, call: str | None) -> str:
        return str(await self._call("reward", value, call))

    async def end(self, reward: float | None) -> dict[str, Any]:
        summary: dict[str, Any] = await self._call("end", reward)
        return summary

    async def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = await self._call("summary")
        return summary

    def count_unmet(self, unmet: Mapping[str, str]) -> None:
        self.channel.tell("count_unmet", self.id, dict(unmet))

    def drop(self, ids: Sequence[str]) -> None:
        self.channel.tell("drop", self.id, list(ids))

    def sent(self, ids: Sequence[str]) -> None:
        self.channel.tell("sent", self.id, list(ids))

    async def _call(self, operation: str, *arguments: Any) -> Any:
        return await self.channel.call(operation, self.id, *arguments)


@dataclass(frozen=True)
class RemoteMemory:
    """The replies of a session over the channel (prompts.ReplyMemory). recalled: the latest one that
    was found, which comes with the reasonings: it is the one that a prompt begins with."""

    channel: Channel
    session: str
    recalled: dict[bytes, bytes] = field(default_factory=dict)

    async def add(self, key: bytes, held: CachedReply) -> None:
        # not awaited: the request's `finish`, which is, comes after it
        self.channel.tell("remember", self.session, key, held.reply.reasoning, wire.dumps(held))

    async def reasonings(self, keys: Sequence[bytes]) -> dict[int, str | None]:
        joined = b"".join(keys)
        found, latest = await self.channel.call("reasonings", self.session, joined, len(keys))
        if latest is not None:
            self.recalled[keys[max(place for place, _ in found)]] = latest
        return dict(found)

    async def get(self, key: bytes) -> CachedReply:
        if (data := self.recalled.get(key)) is None:
            data = await self.channel.call("recall", self.session, key)
        held: CachedReply = wire.loads(data)
        return held


@dataclass(frozen=True)
class RemoteWork:
    """Episodes for agents' workers over the channel (work.Work)."""

    channel: Channel
    keys: list[str]

    async def take(self, worker: str, seconds: float) -> Assignment | None:
        is_over, assignment = await self.channel.call("take", self.keys, worker, seconds)
        if is_over:
            raise WorkOver
        found: Assignment | None = assignment
        return found

    async def renew(self, ids: Sequence[str]) -> list[str]:
        return list(await self.channel.call("renew", self.keys, list(ids)))

    async def answer(self, id: str, answer: WorkAnswer) -> bool:
        return bool(await self.channel.call("answer", self.keys, id, answer.model_dump()))

    async def give_back(self, id: str) -> bool:
        return bool(await self.channel.call("give_back", self.keys, id))

    def lose(self, id: str) -> None:
        self.channel.tell("give_back", self.keys, id)
