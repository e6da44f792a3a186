"""The ways in which a vLLM server fails."""

from __future__ import annotations

from areal_x.protocols.engine import EngineError


class ServerLost(EngineError):
    """The server did not respond."""


class ServerRestarted(ServerLost):
    """The response shows that the server does not have the weights that it was given."""


class ServerTorn(EngineError):
    """An update broke off in the middle: the server has parts of two policies, and is paused."""


class ServerFailed(EngineError):
    """The server responded with an error of its own, not of the request's."""


class ServerRefused(EngineError):
    """The server found a mistake in the request. words: its own message."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words
