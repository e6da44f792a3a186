"""Responses that may be streams of server-sent events, and that are not computed once the client is
gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

COMMENT = b": waiting\n\n"  # ignored by clients
SLICE = 1 << 16  # bytes per write
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


@dataclass(frozen=True)
class ErrorResponse:
    """A response other than 200. in_stream: the same as a stream's last events, if it had begun."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    in_stream: bytes


@dataclass(frozen=True)
class PendingResponse:
    """The ASGI response to one request while its content is being computed.

    work: returns a JSON body, or the events of a stream; cancelled when the client disconnects
    first. refusal: converts an exception of `work`. unsent: called if there was a response and no
    client to read it; sent: if there was one, as far as is known. A stream begins with its first
    event, or, after `beat_seconds`, with `beat`, which is repeated at that interval: so an error
    that comes soon still has its HTTP status.
    """

    work: Coroutine[Any, Any, bytes | list[bytes]]
    refusal: Callable[[BaseException], ErrorResponse]
    unsent: Callable[[], None]
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    beat: bytes = COMMENT
    beat_seconds: float = 10.0
    sent: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self.work)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            begun = await self._wait(work, gone, send)
            if work.done():
                await self._finish(work, begun, send)
                if not work.exception():
                    (self.unsent if gone.done() else self.sent)()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _wait(
        self, work: asyncio.Future[Any], gone: asyncio.Future[None], send: Send
    ) -> bool:
        """Waits for a response, or for the client to disconnect. Returns True if the stream has
        begun."""
        begun = False
        while not work.done() and not gone.done():
            seconds = self.beat_seconds if self.stream else None
            done, _ = await asyncio.wait(
                {work, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                if not begun:
                    await self._start(send, 200, STREAM)
                await _more(send, self.beat)
                begun = True
        return begun

    async def _finish(
        self, work: asyncio.Future[bytes | list[bytes]], begun: bool, send: Send
    ) -> None:
        error = work.exception()
        if error is None:
            content = work.result()
            if not begun:
                await self._start(send, 200, JSON if isinstance(content, bytes) else STREAM)
            for part in sliced([content] if isinstance(content, bytes) else content):
                await _more(send, part)
                # otherwise a socket that accepts everything at once would occupy the loop
                await asyncio.sleep(0)
        else:
            refusal = self.refusal(error)
            if not begun:
                await self._start(send, refusal.status, {**JSON, **refusal.headers})
            await _more(send, refusal.in_stream if begun else refusal.body)

    async def _start(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        pairs = [
            (name.encode(), value.encode()) for name, value in {**self.headers, **headers}.items()
        ]
        await send({"type": "http.response.start", "status": status, "headers": pairs})


def sliced(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in slices of at most SLICE."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        for start in range(0, len(part), SLICE):
            piece = part[start : start + SLICE]
            if held and size + len(piece) > SLICE:
                yield b"".join(held)
                held = []
                size = 0
            held.append(piece)
            size += len(piece)
    if held:
        yield b"".join(held)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + dumped(data) + b"\n\n"


def dumped(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def dumped_slowly(data: Mapping[str, Any]) -> bytes:
    """Encodes the same in pure Python: for a thread beside the loop, since the other holds Python's
    lock until it is done."""
    return "".join(
        json.JSONEncoder(allow_nan=False, separators=(",", ":")).iterencode(data)
    ).encode()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
