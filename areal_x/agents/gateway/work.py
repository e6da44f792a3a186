"""The routes of workers: programs on other machines that take episodes of a run, one after another
or several at once, and answer them (areal_x.agents.worker).

| request, with the gateway's own key | |
|---|---|
| `POST /work` | waits for an episode: its task, and its session's key |
| `POST /work/alive` | a sign of life for the episodes that the worker has |
| `POST /work/LEASE/answer` | the agent's result, or its error |
| `POST /work/LEASE/return` | gives an episode back, for another worker |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_x.agents.gateway.exchange import Body
from areal_x.agents.gateway.http import (
    LABEL_MEGABYTES,
    OPENAI,
    body_of,
    json_response,
    keys_of,
    with_errors,
)
from areal_x.agents.gateway.streams import PendingResponse, dumped
from areal_x.runtime.thread import inline_or_in_pool

MOST_WAIT_SECONDS = 60.0  # proxies and firewalls forget connections that are silent for longer
ANSWER_MEGABYTES = 1.0
MOST_LEASES = 4096  # of one worker
Id = Annotated[str, Field(max_length=64)]


class WorkOver(Exception):
    """The run gives out no more episodes."""


class WorkBody(Body):
    worker: Annotated[str, Field(max_length=256)] = ""
    wait_seconds: Annotated[float, Field(ge=0, le=MOST_WAIT_SECONDS)] = 20.0


class AliveBody(Body):
    leases: Annotated[list[Id], Field(max_length=MOST_LEASES, fail_fast=True)]


class WorkAnswer(Body):
    """What an agent returned (`result`), what its program printed (`printed`: counts unless the
    session was given rewards), or what went wrong (`error`)."""

    result: Annotated[float, Field(allow_inf_nan=False)] | str | None = None
    printed: str | None = None
    error: Annotated[str, Field(max_length=1 << 14)] | None = None


@dataclass(frozen=True)
class Assignment:
    """An episode for a worker. lease: also the id of its session. key: the session's. task: as
    JSON. lease_seconds: longest time between two signs of life."""

    lease: str
    key: str
    task: bytes
    lease_seconds: float

    def written(self) -> bytes:
        about = {"lease": self.lease, "key": self.key, "lease_seconds": self.lease_seconds}
        return dumped(about)[:-1] + b',"task":' + self.task + b"}"


class WorkSource(Protocol):
    """Where episodes come from (areal_x.agents.board)."""

    async def take(self, worker: str, seconds: float) -> Assignment | None: ...

    def renew(self, ids: Sequence[str]) -> list[str]: ...

    def answer(self, id: str, answer: WorkAnswer) -> bool: ...

    def give_back(self, id: str) -> bool: ...


class Work(Protocol):
    """A WorkSource as the routes reach it: in the process of the run, or from a worker process.
    lose: gives back without waiting."""

    async def take(self, worker: str, seconds: float) -> Assignment | None: ...

    async def renew(self, ids: Sequence[str]) -> list[str]: ...

    async def answer(self, id: str, answer: WorkAnswer) -> bool: ...

    async def give_back(self, id: str) -> bool: ...

    def lose(self, id: str) -> None: ...


@dataclass(frozen=True)
class OwnWork:
    """The source of this process."""

    source: WorkSource

    async def take(self, worker: str, seconds: float) -> Assignment | None:
        return await self.source.take(worker, seconds)

    async def renew(self, ids: Sequence[str]) -> list[str]:
        return self.source.renew(ids)

    async def answer(self, id: str, answer: WorkAnswer) -> bool:
        return self.source.answer(id, answer)

    async def give_back(self, id: str) -> bool:
        return self.source.give_back(id)

    def lose(self, id: str) -> None:
        self.source.give_back(id)


class WorkHost(Protocol):
    """The part of a host (areal_x.agents.gateway.record) that these routes use."""

    async def work_for(self, keys: list[str]) -> Work: ...


def work_routes(host: WorkHost) -> list[Route]:
    async def take(request: Request) -> ASGIApp:
        source = await host.work_for(keys_of(request))
        body = WorkBody.read(await body_of(request, LABEL_MEGABYTES) or b"{}")
        taken: list[str] = []

        async def work() -> bytes:
            try:
                assignment = await source.take(body.worker, body.wait_seconds)
            except WorkOver:
                return dumped({"over": True})
            if assignment is None:
                return dumped({"lease": None})
            taken.append(assignment.lease)
            return assignment.written()

        def unsent() -> None:
            for lease in taken:
                source.lose(lease)

        return PendingResponse(work(), OPENAI.refusal, unsent)

    async def alive(request: Request) -> ASGIApp:
        source = await host.work_for(keys_of(request))
        body = AliveBody.read(await body_of(request, ANSWER_MEGABYTES))
        return json_response({"lost": await source.renew(body.leases)})

    async def answer(request: Request) -> ASGIApp:
        source = await host.work_for(keys_of(request))
        body = await body_of(request, ANSWER_MEGABYTES)
        given = await inline_or_in_pool(len(body), WorkAnswer.read, body)
        return json_response({"counts": await source.answer(request.path_params["lease"], given)})

    async def give_back(request: Request) -> ASGIApp:
        source = await host.work_for(keys_of(request))
        return json_response({"counts": await source.give_back(request.path_params["lease"])})

    return [
        Route(path, with_errors(handler, OPENAI), methods=["POST"])
        for path, handler in (
            ("/work", take),
            ("/work/alive", alive),
            ("/work/{lease}/answer", answer),
            ("/work/{lease}/return", give_back),
        )
    ]
