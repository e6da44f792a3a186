"""Runs inside the vLLM server's front end: no route responds without the key.

vLLM checks keys below /v1, /v2, /inference and /cohere only; requests that replace weights, pause
generation or call workers pass without one. Its --middleware takes the class below, which runs
before everything else.

    VLLM_API_KEY=… python -m vllm.entrypoints.openai.api_server … --middleware areal_x.engines.vllm.gate.Gate
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

KEY = "VLLM_API_KEY"
GATE = f"{__name__}.Gate"  # as --middleware takes it
# comma-separated names under which a server may be reached besides this machine's own
HOSTS = "AREAL_X_HOSTS"
LOCAL = ("127.0.0.1", "localhost", "::1")
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gate:
    """ASGI middleware: 401 without the key, 403 for a foreign Host or Origin (another site's page,
    DNS rebinding).

    Without a key in the environment it rejects everything.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.key = os.environ.get(KEY, "")
        self.hosts = {
            *LOCAL,
            *filter(None, (name.strip().lower() for name in os.environ.get(HOSTS, "").split(","))),
        }

    async def __call__(
        self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Send
    ) -> None:
        lifespan = scope["type"] == "lifespan"  # startup and shutdown of the server itself
        why = None if lifespan else refusal(list(scope["headers"]), self.key, self.hosts)
        if why is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            # arrives as a 403
            await send({"type": "websocket.close", "code": 1008, "reason": why[1]})
        else:
            body = json.dumps({"error": {"message": why[1]}}).encode()
            headers = {
                b"content-type": b"application/json",
                b"content-length": b"%d" % len(body),
                b"connection": b"close",
            }
            await send(
                {"type": "http.response.start", "status": why[0], "headers": list(headers.items())}
            )
            await send({"type": "http.response.body", "body": body})


def refusal(
    headers: list[tuple[bytes, bytes]], key: str, hosts: set[str]
) -> tuple[int, str] | None:
    """Returns the status and message that a request is rejected with, or None if it may pass."""

    def given(name: bytes) -> list[str]:
        return [
            value.decode("latin-1").strip() for header, value in headers if header.lower() == name
        ]

    host = given(b"host")
    if len(host) != 1 or name_in(f"//{host[0]}") not in hosts:
        return 403, f"this server is not served under that Host: {HOSTS} adds others"
    if any(
        origin.lower() not in (f"http://{host[0]}".lower(), f"https://{host[0]}".lower())
        for origin in given(b"origin")
    ):
        return 403, "pages of other sites are not served"
    kind, _, sent = (given(b"authorization") or [""])[0].partition(" ")
    if (
        not key
        or kind.lower() != "bearer"
        or not hmac.compare_digest(digest(sent.strip()), digest(key))
    ):
        return 401, "Unauthorized"
    return None


def name_in(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def unprotected_warning(url: str) -> str:
    """Returns a warning about a user's server that accepts control requests without a key."""
    remedy = (
        f"start it with {KEY} set and --middleware {GATE} (and {HOSTS}=its name, unless that is"
        " localhost)"
    )
    return (
        f"anyone who can reach the vLLM server at {url} can replace its weights, without a key:"
        f" {remedy}; see docs/security.md"
    )
