"""How the routes read requests and answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from areal_x.errors import UserError
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tinker import requests
from areal_x.tinker.account import Account
from areal_x.tinker.futures import Unknown
from areal_x.tinker.journal import Sent

WIRE = "application/x-protobuf"
MEGABYTE = 1 << 20
DATA_MEGABYTES = 64  # of datums
BODY_MEGABYTES = 8
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

Handler = Callable[[Account, Request], Awaitable[Any]]


def durable(handler: Handler) -> Handler:
    """Answers only once what the request changed is on disk: an answer that a client has seen stays
    true after a kill."""

    async def answer(account: Account, request: Request) -> Any:
        found = await handler(account, request)
        await account.server.journal.written()
        return found

    return answer


def json_response(found: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, HEADERS, "application/json")


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"error": message, "detail": message})
    return Response(body, status, {**HEADERS, **(headers or {})}, "application/json")


async def bytes_of(request: Request, megabytes: int) -> bytes:
    """Raises: HTTPException for a body that is longer, or compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "bodies are not compressed here")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > megabytes * MEGABYTE:
            raise HTTPException(413, f"the body is longer than {megabytes} MiB")
        parts.append(part)
    return b"".join(parts)


async def body_of(request: Request, kind: type[requests.B]) -> requests.B:
    """Raises: HTTPException; UserError."""
    return (await sent_of(request, kind, ""))[0]


async def sent_of(request: Request, kind: type[requests.B], name: str) -> tuple[requests.B, Sent]:
    """Returns a body, and the same for the journal under its kind's name.

    Raises: HTTPException; UserError.
    """
    data = await bytes_of(request, BODY_MEGABYTES)
    return await inline_or_in_pool(len(data), requests.read, kind, data), Sent(name, data)


def found(look: Callable[[], Any]) -> Any:
    """Returns what is there. Raises: Unknown in place of a UserError."""
    try:
        return look()
    except UserError as error:
        raise Unknown from error
