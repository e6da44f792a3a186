"""From a parsed request to its answers: renders the prompt, has the engine continue it, and parses
the completions, over a session's record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from areal_x.agents.chat.dialogue import ChatAnswer, ChatEngine, ChatRequest
from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.content import without_images
from areal_x.agents.gateway.exchange import CallAnswer, Exchange, unmet_constraints
from areal_x.agents.gateway.record import Record
from areal_x.agents.gateway.retries import Attempt, Client
from areal_x.agents.gateway.session import StoredResponse
from areal_x.errors import UserError
from areal_x.protocols.engine import ChatServer, Completion, Request
from areal_x.rollout.episode import first_of

# makes what is stored of the answers, if anything is
Keep = Callable[[Sequence[CallAnswer]], Awaitable[StoredResponse | None]]


@dataclass(frozen=True)
class CallEngine:
    """The engine as one call sees it (areal_x.protocols.workflow.Generator)."""

    record: Record
    id: str

    version = -1

    @property
    def context(self) -> int:
        return self.record.context

    async def generate(self, request: Request) -> Completion:
        return await self.record.generate(self.id, request)

    def chat_servers(self) -> Sequence[ChatServer]:
        raise UserError("the session's renderer has its servers")


async def answered(
    record: Record,
    exchange: Exchange,
    ids: Sequence[str],
    attempt: Attempt,
    client: Client | None,
    keep: Keep,
) -> tuple[list[CallAnswer], StoredResponse | None]:
    """Returns as many completions as there are ids, and what `keep` made of them, and records both
    once all have finished. Whoever is given an exception, or does not send the answers, drops the ids.

    Raises: ApiError because of limits, the session's end, or an aborted completion; what
    ChatEngine.answer does.
    """
    sampling = await record.begin(ids, attempt, exchange.requested_sampling, exchange.ignored)
    chat_request = replace(shown(record.renderer, exchange.chat_request), sampling=sampling)

    async def answer(id: str) -> ChatAnswer:
        engine = ChatEngine(record.renderer, CallEngine(record, id), record.memory)
        return await engine.answer(chat_request, id)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(id)) for id in ids]
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    answers = [CallAnswer(id, task.result()) for id, task in zip(ids, tasks, strict=True)]
    stored = await keep(answers)
    await record.finish(answers, attempt, client, stored)
    for one in answers:
        if unmet := await unmet_constraints(chat_request, one.answer.reply):
            record.count_unmet({name: requested(chat_request, name) for name in unmet})
    return answers, stored


def requested(chat_request: ChatRequest, name: str) -> str:
    """Returns what the request has for a constraint, for a line of the log."""
    return f"{chat_request.format if name == 'format' else chat_request.template[name]}"[:200]


def shown(renderer: Renderer, chat_request: ChatRequest) -> ChatRequest:
    """Returns the request with notices in place of images if the model reads none."""
    if renderer.sees_images:
        return chat_request
    return replace(chat_request, messages=tuple(without_images(chat_request.messages)))
