"""The HTTP routes: authentication, request bodies, and responses in the form of each API."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_x.agents.chat.dialogue import ChatRequest
from areal_x.agents.gateway import messages, responses
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
from areal_x.agents.gateway.responses import Responses
from areal_x.agents.gateway.retries import Client, SentAnswer, attempt_at
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.streams import (
    PendingResponse,
    dumped,
    dumped_slowly,
)
from areal_x.agents.gateway.work import WorkHost, work_routes
from areal_x.runtime.thread import INLINE, inline_or_in_pool
from areal_x.tasks.text_length import CHARACTERS_PER_TOKEN, estimate_tokens

LOG = logging.getLogger(__name__)

MODEL = "policy"
# An OpenAI client's base_url includes the version, an Anthropic client appends it, and users mix the
# two up.
VERSIONS = ("", "/v1", "/v1/v1")


class SessionHost(WorkHost, Protocol):
    """The part of a Gateway that the routes use."""

    beat_seconds: float

    def is_open(self, client: Client | None) -> bool: ...

    def find(self, name: str | None, keys: list[str]) -> GatewaySession: ...

    def admit(self, keys: list[str]) -> None: ...

    async def open_waiting(self, label: str | None) -> GatewaySession: ...


# the exchange, and a callback for its answers
Made = tuple[Exchange, Callable[[Any], None] | None]


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
        session.ignore(exchange.ignored)
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
                    session.store(id, exchange, answers)

            return exchange, keep

        return await answer(request, RESPONSES, responses.PREFIX, make)

    def stored_response(request: Request) -> tuple[GatewaySession, str]:
        session = session_of(request)
        if (id := request.path_params["response"]) not in session.stored:
            raise ApiError(404, f"Response with id '{id}' not found.", "response_not_found")
        return session, id

    async def retrieve_response(request: Request) -> ASGIApp:
        session, id = stored_response(request)
        exchange, answers = session.stored[id]
        return json_response(exchange.whole(answers))

    async def delete_response(request: Request) -> ASGIApp:
        session, id = stored_response(request)
        del session.stored[id], session.conversations[id]
        return json_response({"id": id, "object": "response", "deleted": True})

    async def count_input_tokens(request: Request) -> ASGIApp:
        session = session_of(request)
        body = await body_of(request, session.limits.body_megabytes)
        exchange = await inline_or_in_pool(
            len(body), Responses, body, "", 0, session.renderer.text, session.conversations
        )
        counted = await tokens_in(session, exchange.chat_request, Responses)
        return json_response({"object": "response.input_tokens", "input_tokens": counted})

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
        counted = await tokens_in(session, chat_request, Messages)
        return json_response({"input_tokens": counted})

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


async def tokens_in(
    session: GatewaySession, chat_request: ChatRequest, exchange: type[Messages | Responses]
) -> int:
    """Returns the number of tokens of a request's prompt, tokenised anew. Raises: as a request for
    a completion."""
    await check_schemas(session.schemas, chat_request, exchange.tool_param, exchange.format_param)
    renderer = session.renderer
    text = await renderer.rendered(
        session.shown(chat_request).messages,
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


def written(
    exchange: Exchange, answers: Sequence[CallAnswer], dump: Callable[[Mapping[str, Any]], bytes]
) -> bytes | list[bytes]:
    return exchange.events(answers) if exchange.stream else dump(exchange.whole(answers))


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
