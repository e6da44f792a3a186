"""A session's record as the routes reach it: in the process of the run, or from a worker process.

Whatever process parses a request and renders its prompt, the calls, replies, limits and keys are in
one place, the GatewaySession in the process of the run. `OwnHost` and `OwnRecord` reach it there;
`remote.RemoteHost` and `remote.RemoteRecord` from a worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal_x.agents.chat.prompts import ReplyCache, ReplyMemory
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.exchange import CallAnswer, RequestedSampling
from areal_x.agents.gateway.retries import Attempt, Client, SentAnswer
from areal_x.agents.gateway.session import GatewaySession, StoredResponse
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.gateway.work import OwnWork, Work
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.types import Message

if TYPE_CHECKING:
    from areal_x.agents.gateway.gateway import Gateway


class Record(Protocol):
    """The record of the session whose key a request brought. See the methods of GatewaySession with
    the same names. memory: of the policy's replies. context: the engine's."""

    @property
    def limits(self) -> SessionLimits: ...

    @property
    def context(self) -> int: ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def schemas(self) -> CheckedSchemas: ...

    @property
    def memory(self) -> ReplyMemory: ...

    async def find_lost(self, attempt: Attempt, client: Client | None) -> SentAnswer | None: ...

    async def begin(
        self,
        ids: Sequence[str],
        attempt: Attempt,
        requested: RequestedSampling,
        ignored: frozenset[str],
    ) -> SamplingParams: ...

    async def generate(self, id: str, request: Request) -> Completion: ...

    async def finish(
        self,
        answers: Sequence[CallAnswer],
        attempt: Attempt,
        client: Client | None,
        stored: StoredResponse | None,
    ) -> None: ...

    async def conversation(self, id: str) -> Sequence[Message] | None:
        """Returns that of a response, None if the session keeps none of this id."""
        ...

    async def stored(self, id: str) -> bytes | None:
        """Returns a stored response as JSON."""
        ...

    async def forget(self, id: str) -> bool:
        """Forgets a stored response; False if there is none."""
        ...

    async def reward(self, value: float, call: str | None) -> str: ...

    async def end(self, reward: float | None) -> dict[str, Any]:
        """Ends the session and returns its summary."""
        ...

    async def summary(self) -> dict[str, Any]: ...

    # These are reported without waiting: the client may be gone.

    def count_unmet(self, unmet: Mapping[str, str]) -> None: ...

    def drop(self, ids: Sequence[str]) -> None: ...

    def sent(self, ids: Sequence[str]) -> None:
        """The response to these calls was written to its client."""
        ...


class Host(Protocol):
    """The gateway as the routes reach it."""

    @property
    def beat_seconds(self) -> float: ...

    async def find(self, name: str | None, keys: list[str]) -> Record:
        """Returns the record of a session, see SessionKeys.find; counts as activity."""
        ...

    async def admit(self, keys: list[str]) -> None:
        """Raises: ApiError unless the client may request a session."""
        ...

    async def open_session(self, keys: list[str], label: str | None) -> dict[str, Any]:
        """Opens a session that waits for an agent, and returns what the agent is told."""
        ...

    async def work_for(self, keys: list[str]) -> Work:
        """Returns what gives workers episodes. Raises: ApiError."""
        ...


@dataclass(frozen=True)
class OwnRecord:
    """The record of a session of this process."""

    session: GatewaySession
    is_open: Callable[[Client | None], bool]

    @property
    def limits(self) -> SessionLimits:
        return self.session.limits

    @property
    def context(self) -> int:
        return self.session.engine.context

    @property
    def renderer(self) -> Renderer:
        return self.session.renderer

    @property
    def schemas(self) -> CheckedSchemas:
        return self.session.schemas

    @property
    def memory(self) -> ReplyMemory:
        return ReplyCache(self.session.replies)

    async def find_lost(self, attempt: Attempt, client: Client | None) -> SentAnswer | None:
        return self.session.find_lost(attempt, client, self.is_open)

    async def begin(
        self,
        ids: Sequence[str],
        attempt: Attempt,
        requested: RequestedSampling,
        ignored: frozenset[str],
    ) -> SamplingParams:
        return self.session.begin(ids, attempt, requested, ignored)

    async def generate(self, id: str, request: Request) -> Completion:
        return await self.session.generate(id, request)

    async def finish(
        self,
        answers: Sequence[CallAnswer],
        attempt: Attempt,
        client: Client | None,
        stored: StoredResponse | None,
    ) -> None:
        self.session.finish(answers, attempt, client, stored)

    async def conversation(self, id: str) -> Sequence[Message] | None:
        return self.session.conversations.get(id)

    async def stored(self, id: str) -> bytes | None:
        return self.session.stored.get(id)

    async def forget(self, id: str) -> bool:
        return self.session.forget(id)

    async def reward(self, value: float, call: str | None) -> str:
        return self.session.reward(value, call)

    async def end(self, reward: float | None) -> dict[str, Any]:
        self.session.end(reward)
        return self.session.summary()

    async def summary(self) -> dict[str, Any]:
        return self.session.summary()

    def count_unmet(self, unmet: Mapping[str, str]) -> None:
        self.session.count_unmet(unmet)

    def drop(self, ids: Sequence[str]) -> None:
        self.session.drop(ids)

    def sent(self, ids: Sequence[str]) -> None:
        pass  # known already: see GatewaySession.finish


@dataclass(frozen=True)
class OwnHost:
    """The gateway of this process."""

    gateway: Gateway

    @property
    def beat_seconds(self) -> float:
        return self.gateway.beat_seconds

    async def find(self, name: str | None, keys: list[str]) -> OwnRecord:
        session = self.gateway.find(name, keys)
        session.touch()
        return OwnRecord(session, self.gateway.is_open)

    async def admit(self, keys: list[str]) -> None:
        self.gateway.admit(keys)

    async def open_session(self, keys: list[str], label: str | None) -> dict[str, Any]:
        return (await self.gateway.open_waiting(label)).about()

    async def work_for(self, keys: list[str]) -> Work:
        return OwnWork(self.gateway.work_for(keys))
