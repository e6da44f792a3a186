"""What all routes share: keys, bodies, and errors in the form of each API."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from areal_x.agents.gateway.errors import ApiError, anthropic_body, api_error, openai_body
from areal_x.agents.gateway.streams import COMMENT, ErrorResponse, dumped, event
from areal_x.runtime.waits import waiting

LOG = logging.getLogger(__name__)

MEGABYTE = 2**20
LABEL_MEGABYTES = 1 / 64  # for bodies that hold a label or a number
BODY_SECONDS = 120.0  # for the whole request
TRACEBACK_CALLS, TRACEBACK_CHARACTERS = 10, 4000  # in the log

Handler = Callable[[Request], Awaitable[ASGIApp]]


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


def json_response(data: Mapping[str, Any]) -> Response:
    return Response(dumped(data), media_type="application/json")
