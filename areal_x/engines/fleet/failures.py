"""The ways in which a server fails."""

from __future__ import annotations

import json

from areal_x.protocols.engine import EngineError


class ServerLost(EngineError):
    """The server did not respond."""


class ServerRestarted(ServerLost):
    """The response shows that the server does not have the weights that it was given."""


class ServerTorn(EngineError):
    """An update broke off in the middle: the server has parts of two policies, and is paused."""


class WeightsDiffer(EngineError):
    """The server's workers do not use the weights that were published."""


class ServerFailed(EngineError):
    """The server responded with an error of its own, not of the request's."""


class ServerRefused(EngineError):
    """The server found a mistake in the request. words: its own message."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


def error_message(body: bytes) -> str:
    """Returns the message in a server's JSON error."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:300]
    error = (
        answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    )
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
