"""The HTTP routes: authentication, request bodies, and responses in the form of each API."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_x.agents.chat.dialogue import ChatRequest
from areal_x.agents.gateway import messages, responses
from areal_x.agents.gateway.answering import Keep, answered, shown
from areal_x.agents.gateway.chat_completions import ChatCompletions
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import Body, CallAnswer, Exchange, check_schemas
from areal_x.agents.gateway.http import (
    ANTHROPIC,
    LABEL_MEGABYTES,
    OPENAI,
    RESPONSES,
    Dialect,
    body_of,
    json_response,
    keys_of,
    no_such_route,
    with_errors,
)
from areal_x.agents.gateway.messages import Messages
from areal_x.agents.gateway.record import Host, Record
from areal_x.agents.gateway.responses import ResponseRequest, Responses
from areal_x.agents.gateway.retries import attempt_at
from areal_x.agents.gateway.session import StoredResponse
from areal_x.agents.gateway.streams import (
    PendingResponse,
    dumped,
    dumped_slowly,
)
from areal_x.agents.gateway.work import work_routes
from areal_x.runtime.thread import INLINE, inline_or_in_pool
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_tokens

LOG = logging.getLogger(__name__)

MODEL = "policy"
# An OpenAI client's base_url includes the version, an Anthropic client appends it, and users mix the
# two up.
VERSIONS = ("", "/v1", "/v1/v1")


# parses a body, for an answer with this id
Make = Callable[[Record, bytes, str], Awaitable[tuple[Exchange, Keep]]]


class RewardBody(Body):
    reward: float
    call: str | None = None


class EndBody(Body):
    reward: float | None = None


class OpenBody(Body):
    label: Annotated[str, Field(max_length=1024)] | None = None


def application(host: Host) -> Starlette:
    """Returns the application: every route with and without a session in its path."""

    async def session_of(request: Request) -> Record:
        return await host.find(request.path_params.get("session"), keys_of(request))

    async def answer(request: Request, dialect: Dialect, prefix: str, make: Make) -> ASGIApp:
        session = await session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        client = None if request.client is None else (request.client.host, request.client.port)
        attempt = attempt_at(prefix, request.headers, body)
        previous = await session.find_lost(attempt, client)
        id = f"{prefix}{secrets.token_hex(12)}" if previous is None else previous.answers[0].id
        exchange, keep = await make(session, body, id)
        await check_schemas(
            session.schemas, exchange.chat_request, exchange.tool_param, exchange.format_param
        )
        ids = [id, *(f"{id}-{index}" for index in range(1, exchange.count))]

        async def work() -> bytes | list[bytes]:
            try:
                answers, stored = (
                    await answered(session, exchange, ids, attempt, client, keep)
                    if previous is None
                    else (previous.answers, None)
                )
                if stored is not None and not exchange.stream:
                    return stored.body
                size = size_of(answers)
                return await inline_or_in_pool(size, written, exchange, answers, dump_for(size))
            except BaseException:
                session.drop(ids)
                raise

        headers = {"x-areal-call": ",".join(ids), "x-request-id": id, "request-id": id}
        return PendingResponse(
            work(),
            dialect.refusal,
            partial(session.drop, ids),
            headers,
            exchange.stream,
            dialect.beat,
            host.beat_seconds,
            partial(session.sent, ids),
        )

    async def chat_completions(request: Request) -> ASGIApp:
        async def make(session: Record, body: bytes, id: str) -> tuple[Exchange, Keep]:
            now = int(time.time())
            text = session.renderer.text
            return await inline_or_in_pool(
                len(body), ChatCompletions, body, id, now, text
            ), keep_nothing

        return await answer(request, OPENAI, "chatcmpl-", make)

    async def create_response(request: Request) -> ASGIApp:
        async def make(session: Record, body: bytes, id: str) -> tuple[Exchange, Keep]:
            exchange = await response_of(session, body, id, int(time.time()))

            async def keep(answers: Sequence[CallAnswer]) -> StoredResponse | None:
                if not exchange.stores:
                    return None
                size = size_of(answers)
                whole = await inline_or_in_pool(
                    size, written_whole, exchange, answers, dump_for(size)
                )
                return StoredResponse(id, whole, exchange.conversation(answers))

            return exchange, keep

        return await answer(request, RESPONSES, responses.PREFIX, make)

    async def retrieve_response(request: Request) -> ASGIApp:
        session = await session_of(request)
        id = request.path_params["response"]
        if (stored := await session.stored(id)) is None:
            raise no_response(id)
        return Response(stored, media_type="application/json")

    async def delete_response(request: Request) -> ASGIApp:
        session = await session_of(request)
        id = request.path_params["response"]
        if not await session.forget(id):
            raise no_response(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def count_input_tokens(request: Request) -> ASGIApp:
        session = await session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        exchange = await response_of(session, body, "", 0)
        counted = await tokens_in(session, exchange.chat_request, Responses)
        return json_response({"object": "response.input_tokens", "input_tokens": counted})

    async def create_message(request: Request) -> ASGIApp:
        async def make(session: Record, body: bytes, id: str) -> tuple[Exchange, Keep]:
            return await inline_or_in_pool(len(body), Messages, body, id), keep_nothing

        return await answer(request, ANTHROPIC, messages.PREFIX, make)

    async def count_tokens(request: Request) -> ASGIApp:
        session = await session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        chat_request = await inline_or_in_pool(len(body), messages.read_count_request, body)
        counted = await tokens_in(session, chat_request, Messages)
        return json_response({"input_tokens": counted})

    async def models(request: Request) -> ASGIApp:
        known = model(await session_of(request))
        return json_response(
            {
                "object": "list",
                "data": [known],
                "has_more": False,
                "first_id": MODEL,
                "last_id": MODEL,
            }
        )

    async def one_model(request: Request) -> ASGIApp:
        session = await session_of(request)
        if (name := request.path_params["model"]) != MODEL:
            raise ApiError(
                404,
                f"there is no model {name!r}, only {MODEL!r} (which answers to any name)",
                "model_not_found",
                "model",
            )
        return json_response(model(session))

    async def reward(request: Request) -> ASGIApp:
        session = await session_of(request)
        body = RewardBody.read(await body_of(request, LABEL_MEGABYTES))
        call = await session.reward(body.reward, body.call)
        return json_response({"call": call, "reward": body.reward})

    async def end(request: Request) -> ASGIApp:
        session = await session_of(request)
        body = EndBody.read(await body_of(request, LABEL_MEGABYTES) or b"{}")
        return json_response(await session.end(body.reward))

    async def state(request: Request) -> ASGIApp:
        session = await session_of(request)
        return json_response(await session.summary())

    async def open_session(request: Request) -> ASGIApp:
        keys = keys_of(request)
        await host.admit(keys)
        body = OpenBody.read(await body_of(request, LABEL_MEGABYTES) or b"{}")
        about = await host.open_session(keys, body.label)
        return Response(dumped(about), 201, media_type="application/json")

    per_session = (
        ("/chat/completions", "POST", OPENAI, chat_completions),
        ("/responses", "POST", RESPONSES, create_response),
        ("/responses/input_tokens", "POST", OPENAI, count_input_tokens),
        ("/responses/{response}", "GET", OPENAI, retrieve_response),
        ("/responses/{response}", "DELETE", OPENAI, delete_response),
        ("/messages", "POST", ANTHROPIC, create_message),
        ("/messages/count_tokens", "POST", ANTHROPIC, count_tokens),
        ("/models", "GET", OPENAI, models),
        ("/models/{model:path}", "GET", OPENAI, one_model),
        ("/reward", "POST", OPENAI, reward),
        ("/end", "POST", OPENAI, end),
        ("", "GET", OPENAI, state),
    )
    routes = [
        Route(start + version + path, with_errors(handler, dialect), methods=[method])
        for path, method, dialect, handler in per_session
        for version in VERSIONS
        for start in ("/sessions/{session}", "")
        if start + version + path
    ]
    routes.append(Route("/sessions", with_errors(open_session, OPENAI), methods=["POST"]))
    routes += work_routes(host)
    return Starlette(routes=routes, exception_handlers={HTTPException: no_such_route})


async def keep_nothing(answers: Sequence[CallAnswer]) -> None:
    """For requests whose responses cannot be retrieved."""


async def response_of(session: Record, body: bytes, id: str, created: int) -> Responses:
    """Parses a request for a response, which may continue an earlier one."""
    parsed = await inline_or_in_pool(len(body), ResponseRequest.read, body)
    before = parsed.previous_response_id
    earlier = None if before is None else await session.conversation(before)
    text = session.renderer.text
    return await inline_or_in_pool(len(body), Responses, parsed, id, created, text, earlier)


def no_response(id: str) -> ApiError:
    return ApiError(404, f"Response with id '{id}' not found.", "response_not_found")


async def tokens_in(
    session: Record, chat_request: ChatRequest, exchange: type[Messages | Responses]
) -> int:
    """Returns the number of tokens of a request's prompt, tokenised anew. Raises: as a request for
    a completion."""
    await check_schemas(session.schemas, chat_request, exchange.tool_param, exchange.format_param)
    renderer = session.renderer
    text = await renderer.rendered(
        shown(renderer, chat_request).messages,
        chat_request.tools,
        chat_request.template,
        chat_request.continue_final,
    )
    return await inline_or_in_pool(
        len(text),
        estimate_tokens,
        lambda piece: len(renderer.encode(piece, begins=True)),
        text,
    )


Dump = Callable[[Mapping[str, Any]], bytes]


def size_of(answers: Sequence[CallAnswer]) -> int:
    """Estimates the characters of a response."""
    return sum(len(call.answer.completion.tokens) for call in answers) * CHARACTERS_PER_TOKEN


def dump_for(size: int) -> Dump:
    return dumped if size <= INLINE else dumped_slowly


def written(exchange: Exchange, answers: Sequence[CallAnswer], dump: Dump) -> bytes | list[bytes]:
    return exchange.events(answers) if exchange.stream else dump(exchange.whole(answers))


def written_whole(exchange: Exchange, answers: Sequence[CallAnswer], dump: Dump) -> bytes:
    return dump(exchange.whole(answers))


def model(session: Record) -> dict[str, Any]:
    """Describes the model in the form of both APIs."""
    created = "1970-01-01T00:00:00Z"
    openai = {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "areal-x",
        "max_model_len": session.context,
    }
    return {**openai, "type": "model", "display_name": MODEL, "created_at": created}
