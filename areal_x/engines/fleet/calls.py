"""The calls of one server: a request with JSON, and what the status of its answer means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec

from areal_x.engines.fleet.client import CONTROL_SECONDS, HEALTH_SECONDS
from areal_x.engines.fleet.connections import answer_of, status_of
from areal_x.engines.fleet.failures import ServerFailed, ServerRefused, error_message
from areal_x.engines.fleet.http import Pool
from areal_x.errors import UserError

# How a request for tokens is made: it takes as long as it takes.
FOR_TOKENS: dict[str, Any] = {"retry": True, "seconds": None, "takes_slot": True}
Explanation = Callable[[str, str, int, str], UserError | None]
"""What the user must change, from the server's name, the path without a query, the status and the
server's own words; None for an error that no setting would mend."""


class Calls:
    """The calls of one server with one key. Made inside the event loop that uses it. kind: the
    program's name. explain: the errors of this program.

    A call's `how`: `seconds` until it is given up, by default CONTROL_SECONDS; `retry` if the request
    may be sent again when the connection breaks before any response, as happens when a pooled one
    was closed meanwhile; `takes_slot`: see `exchange`.

    Errors: ServerLost if the server is gone, ServerFailed and ServerRefused if it responds with an
    error, UserError for one that `explain` explains, OutOfFiles.
    """

    def __init__(self, url: str, key: str | None, kind: str, explain: Explanation) -> None:
        self._url = url
        self._pool = Pool(url, key, kind)
        self._explain = explain

    async def close(self) -> None:
        self._pool.close()
        await asyncio.sleep(0)  # in which the loop closes the sockets

    async def status(self, path: str, seconds: float = HEALTH_SECONDS) -> int | None:
        """Returns the status of a GET; None if there is no response in time."""
        return await status_of(self._pool, self._url, path, seconds)

    async def json(self, method: str, path: str, body: Any = None, **how: Any) -> Any:
        """Returns the response's JSON; None if it is empty."""
        answer = await self.send(method, path, encoded(body), **how)
        return json.loads(answer) if answer else None

    async def text(self, method: str, path: str, body: Any = None, **how: Any) -> str:
        """Returns the response of an endpoint that responds with a sentence, or with lines."""
        return (await self.send(method, path, encoded(body), **how)).decode()

    async def send(self, method: str, path: str, body: bytes | None, **how: Any) -> bytes:
        """Returns the response to a JSON body."""
        how = {"seconds": CONTROL_SECONDS, **how}
        status, answer = await answer_of(self._pool, self._url, method, path, body=body, **how)
        if status == 200:
            return answer
        raise self._refusal(path.partition("?")[0], status, error_message(answer))

    def _refusal(self, endpoint: str, status: int, words: str) -> Exception:
        server = f"the {self._pool.kind} server at {self._url}"
        if 300 <= status < 400:
            return UserError(
                f"{server} redirects {endpoint}: give the address that it redirects to"
            )
        if (explained := self._explain(server, endpoint, status, words)) is not None:
            return explained
        message = f"{server} answered {endpoint} with {status}: {words}"
        return ServerFailed(message) if status >= 500 else ServerRefused(message, words)


def encoded(body: Any) -> bytes | None:
    """Returns the JSON of a body; None for none."""
    return None if body is None else msgspec.json.encode(body)
