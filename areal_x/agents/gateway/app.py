"""The HTTP routes: authentication, request bodies, and responses in the form of each API."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_x.agents.gateway import messages, responses
from areal_x.agents.gateway.chat_completions import ChatCompletions
from areal_x.agents.gateway.errors import ApiError, anthropic_body, api_error, openai_body
from areal_x.agents.gateway.exchange import Body, CallAnswer, Exchange, check_schemas
from areal_x.agents.gateway.messages import Messages
from areal_x.agents.gateway.responses import Responses
from areal_x.agents.gateway.retries import Client, SentAnswer, attempt_at
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.streams import (
    COMMENT,
    ErrorResponse,
    PendingResponse,
    dumped,
    dumped_slowly,
    event,
)
from areal_x.runtime.thread import INLINE, inline_or_in_pool
from areal_x.runtime.waits import waiting
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_tokens

LOG = logging.getLogger(__name__)

MODEL = "policy"
# An OpenAI client's base_url includes the version, an Anthropic client appends it, and users mix the
# two up.
VERSIONS = ("", "/v1", "/v1/v1")
MEGABYTE = 2**20
LABEL_MEGABYTES = 1 / 64  # for bodies that hold a label or a number
BODY_SECONDS = 120.0  # for the whole request
TRACEBACK_CALLS, TRACEBACK_CHARACTERS = 10, 4000  # in the log


class SessionHost(Protocol):
    """The part of a Gateway that the routes use."""

    beat_seconds: float

    def is_open(self, client: Client | None) -> bool: ...

    def find(self, name: str | None, keys: list[str]) -> GatewaySession: ...

    def admit(self, keys: list[str]) -> None: ...

    async def open_waiting(self, label: str | None) -> GatewaySession: ...


@dataclass(frozen=True)
class Dialect:
    """The form of an API's errors, in a body and in a stream that has begun, and the event that its
    clients ignore while they wait."""

    body: Callable[[ApiError], dict[str, Any]]
    in_stream: Callable[[ApiError], bytes]
    beat: bytes = COMMENT

    def refusal(self, error: BaseException) -> ErrorResponse:
        found = api_error(error)
        if found.code == "internal_error":
            LOG.error("the gateway could not answer a request\n%s", traceback_end(error))
        return ErrorResponse(
            found.status,
            dumped(self.body(found)),
            found.headers,
            self.in_stream(found),
        )

    def refused(self, error: BaseException) -> Response:
        refusal = self.refusal(error)
        return Response(refusal.body, refusal.status, dict(refusal.headers), "application/json")


OPENAI = Dialect(openai_body, lambda error: event(openai_body(error)))
RESPONSES = Dialect(
    openai_body, lambda error: event({**openai_body(error), "type": "error"}, "error")
)
ANTHROPIC = Dialect(
    anthropic_body,
    lambda error: event(anthropic_body(error), "error"),
    event({"type": "ping"}, "ping"),
)

# the exchange, and a callback for its answers
Made = tuple[Exchange, Callable[[Any], None] | None]
Handler = Callable[[Request], Awaitable[ASGIApp]]


class RewardBody(Body):
    reward: float
    call: str | None = None


class EndBody(Body):
    reward: float | None = None


class OpenBody(Body):
    label: Annotated[str, Field(max_length=1024)] | None = None


def application(host: SessionHost) -> Starlette:
    """Returns the application: every route with and without a session in its path."""

    def session_of(request: Request) -> GatewaySession:
        session = host.find(request.path_params.get("session"), keys_of(request))
        session.touch()
        return session

    async def answer(
        request: Request,
        dialect: Dialect,
        prefix: str,
        make: Callable[[GatewaySession, bytes, str], Made],
    ) -> ASGIApp:
        session = session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        client = None if request.client is None else (request.client.host, request.client.port)
        attempt = attempt_at(prefix, request.headers, body)
        previous = session.sent.find_lost(attempt, client, host.is_open)
        id = f"{prefix}{secrets.token_hex(12)}" if previous is None else previous.answers[0].id
        exchange, keep = await inline_or_in_pool(len(body), make, session, body, id)
        await check_schemas(
            session.schemas, exchange.chat_request, exchange.tool_param, exchange.format_param
        )
        ids = [id, *(f"{id}-{index}" for index in range(1, exchange.count))]
        chat_request = session.complete(exchange.chat_request, exchange.requested_sampling)
        if previous is None:
            session.sent.begin(attempt)

        async def work() -> bytes | list[bytes]:
            answers = (
                await session.answers(chat_request, ids) if previous is None else previous.answers
            )
            session.sent.keep(SentAnswer(attempt, answers, client))
            session.state.seen(ids)
            if keep is not None:
                keep(answers)
            size = (
                sum(len(call.answer.completion.tokens) for call in answers) * CHARACTERS_PER_TOKEN
            )
            return await inline_or_in_pool(
                size, written, exchange, answers, dumped if size <= INLINE else dumped_slowly
            )

        headers = {"x-areal-call": ",".join(ids), "x-request-id": id, "request-id": id}
        on_unsent = partial(session.state.unseen, ids)
        return PendingResponse(
            work(),
            dialect.refusal,
            on_unsent,
            headers,
            exchange.stream,
            dialect.beat,
            host.beat_seconds,
        )

    async def chat_completions(request: Request) -> ASGIApp:
        def make(session: GatewaySession, body: bytes, id: str) -> Made:
            return ChatCompletions(body, id, int(time.time()), session.renderer.text), None

        return await answer(request, OPENAI, "chatcmpl-", make)

    async def create_response(request: Request) -> ASGIApp:
        def make(session: GatewaySession, body: bytes, id: str) -> Made:
            exchange = Responses(
                body, id, int(time.time()), session.renderer.text, session.conversations
            )

            def keep(answers: Any) -> None:
                if exchange.stores:
                    session.conversations[id] = exchange.conversation(answers)

            return exchange, keep

        return await answer(request, RESPONSES, responses.PREFIX, make)

    async def create_message(request: Request) -> ASGIApp:
        return await answer(
            request,
            ANTHROPIC,
            messages.PREFIX,
            lambda session, body, id: (Messages(body, id), None),
        )

    async def count_tokens(request: Request) -> ASGIApp:
        session = session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        chat_request = await inline_or_in_pool(len(body), messages.read_count_request, body)
        await check_schemas(
            session.schemas, chat_request, Messages.tool_param, Messages.format_param
        )
        renderer = session.renderer
        text = await renderer.rendered(
            chat_request.messages,
            chat_request.tools,
            chat_request.template,
            chat_request.continue_final,
        )
        return json_response(
            {
                "input_tokens": await inline_or_in_pool(
                    len(text),
                    estimate_tokens,
                    lambda piece: len(renderer.encode(piece, begins=True)),
                    text,
                )
            }
        )

    async def models(request: Request) -> ASGIApp:
        known = model(session_of(request))
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
        session = session_of(request)
        if (name := request.path_params["model"]) != MODEL:
            raise ApiError(
                404,
                f"there is no model {name!r}, only {MODEL!r} (which answers to any name)",
                "model_not_found",
                "model",
            )
        return json_response(model(session))

    async def reward(request: Request) -> ASGIApp:
        session = session_of(request)
        body = RewardBody.read(await body_of(request, LABEL_MEGABYTES))
        return json_response(
            {"call": session.reward(body.reward, body.call), "reward": body.reward}
        )

    async def end(request: Request) -> ASGIApp:
        session = session_of(request)
        body = EndBody.read(await body_of(request, LABEL_MEGABYTES) or b"{}")
        session.end(body.reward)
        return json_response(session.summary())

    async def state(request: Request) -> ASGIApp:
        return json_response(session_of(request).summary())

    async def open_session(request: Request) -> ASGIApp:
        host.admit(keys_of(request))
        body = OpenBody.read(await body_of(request, LABEL_MEGABYTES) or b"{}")
        session = await host.open_waiting(body.label)
        about = {
            "id": session.id,
            "key": session.key,
            "url": session.url,
            "base_url": session.base_url,
        }
        return Response(dumped(about), 201, media_type="application/json")

    per_session = (
        ("/chat/completions", "POST", OPENAI, chat_completions),
        ("/responses", "POST", RESPONSES, create_response),
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
    return Starlette(routes=routes, exception_handlers={HTTPException: no_such_route})


def written(
    exchange: Exchange, answers: Sequence[CallAnswer], dump: Callable[[Mapping[str, Any]], bytes]
) -> bytes | list[bytes]:
    return exchange.events(answers) if exchange.stream else dump(exchange.whole(answers))


def with_errors(handler: Handler, dialect: Dialect) -> Handler:
    """Wraps a handler so that its exceptions become errors in the form of its API."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return dialect.refused(error)

    return endpoint


async def no_such_route(request: Request, error: Exception) -> Response:
    """Answers requests for other paths or methods."""
    assert isinstance(error, HTTPException)
    dialect = ANTHROPIC if "anthropic-version" in request.headers else OPENAI
    return dialect.refused(
        ApiError(
            error.status_code,
            f"{request.method} {request.url.path} is not served here",
            "no_such_route",
        )
    )


def traceback_end(error: BaseException) -> str:
    """Returns the end of a traceback, of any depth."""
    return "".join(traceback.format_exception(error, limit=-TRACEBACK_CALLS))[
        -TRACEBACK_CHARACTERS:
    ]


def keys_of(request: Request) -> list[str]:
    """Returns every key in the headers: a client's environment may add one that is not ours."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    found = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [key for key in (*found, request.headers.get("x-api-key", "")) if key]


async def body_of(request: Request, megabytes: float) -> bytes:
    most = megabytes * MEGABYTE
    parts = []
    size = 0
    try:
        with waiting("the gateway", "the body of a request", idle=True):
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        limit = f"{megabytes:g} MB: raise session_limits.body_megabytes"
                        raise ApiError(
                            413, f"the request is larger than {limit}", "request_too_large"
                        )
                    parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the request did not arrive within {BODY_SECONDS:g} seconds", "request_too_slow"
        ) from None
    return b"".join(parts)


def model(session: GatewaySession) -> dict[str, Any]:
    """Describes the model in the form of both APIs."""
    created = "1970-01-01T00:00:00Z"
    openai = {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "areal-x",
        "max_model_len": session.engine.context,
    }
    return {**openai, "type": "model", "display_name": MODEL, "created_at": created}


def json_response(data: Mapping[str, Any]) -> Response:
    return Response(dumped(data), media_type="application/json")
