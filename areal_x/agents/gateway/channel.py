"""Calls between two processes over a connected pair of sockets, which nobody else has an end of.

Messages are wire.dumps of [kind, number, …], each after its length. Those of one side are received
in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

from areal_x.agents.gateway import wire
from areal_x.agents.gateway.errors import ApiError
from areal_x.runtime import background

LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 31  # of a message; the images of a request are the largest
CALL, RESULT, ERROR, CANCEL, NOTICE = range(5)

# Serves an operation with its arguments: returns the result, or a coroutine of it.
Serve = Callable[..., Any]


class ChannelLost(Exception):
    """The other process has ended."""


class Channel(asyncio.Protocol):
    """One end.

    serve: called with the name and the arguments of each operation of the other side. failure:
    converts its exceptions, which are raised by the other side's `call`. lost: called when the other
    process has ended. what: serves the operations, for error messages.
    """

    def __init__(
        self,
        serve: Serve,
        failure: Callable[[BaseException], ApiError],
        lost: Callable[[], None],
        what: str,
    ) -> None:
        self._serve = serve
        self._failure = failure
        self._lost = lost
        self._what = what
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._serving: dict[int, asyncio.Task[Any]] = {}

    async def open(self, connected: socket.socket) -> None:
        """Begins to serve on one socket of a pair."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connected)

    async def call(self, operation: str, *arguments: Any) -> Any:
        """Returns the result of the other side. A cancellation cancels it there. Raises: ApiError,
        ChannelLost."""
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send([CALL, number, operation, *arguments])
            return await future
        finally:
            if self._calls.pop(number, None) is not None and not self._is_closed:
                self._send([CANCEL, number])

    def tell(self, operation: str, *arguments: Any) -> None:
        """Has the other side do something, without a result; nothing once that has ended."""
        if not self._is_closed:
            self._send([NOTICE, 0, operation, *arguments])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def _is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _send(self, message: list[Any]) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ChannelLost
        data = wire.dumps(message)
        self._transport.write(LENGTH.pack(len(data)) + data)

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin = 0
        while len(self._received) - begin >= LENGTH.size:
            size = LENGTH.unpack_from(self._received, begin)[0]
            if size > MOST_BYTES:
                raise ValueError(f"a message of {size} bytes")  # asyncio closes the channel
            end = begin + LENGTH.size + size
            if end > len(self._received):
                break
            message = bytes(memoryview(self._received)[begin + LENGTH.size : end])
            begin = end
            self._receive(wire.loads(message))
        del self._received[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._serving.values():
            task.cancel()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ChannelLost())
                future.exception()  # retrieved, whether or not anybody waits
        self._calls.clear()
        self._lost()

    def _receive(self, message: list[Any]) -> None:
        kind, number, *rest = message
        if kind == CALL:
            self._serve_call(number, *rest)
        elif kind == NOTICE:
            try:
                self._serve(*rest)
            except Exception as error:
                self._failure(error)  # which logs what it should; nobody waits for it
        elif kind == CANCEL:
            if (task := self._serving.get(number)) is not None:
                task.cancel()
        elif (future := self._calls.pop(number, None)) is not None and not future.done():
            if kind == RESULT:
                future.set_result(rest[0])
            else:
                future.set_exception(ApiError(*rest))

    def _serve_call(self, number: int, operation: str, *arguments: Any) -> None:
        try:
            result = self._serve(operation, *arguments)
        except Exception as error:
            self._answer_error(number, error)
            return
        if not asyncio.iscoroutine(result):
            self._answer(number, RESULT, result)
            return
        task = background.start(self._finish(number, result), self._what)
        self._serving[number] = task
        task.add_done_callback(lambda _: self._serving.pop(number, None))

    async def _finish(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._answer(number, RESULT, await work)
        except Exception as error:
            self._answer_error(number, error)

    def _answer_error(self, number: int, error: Exception) -> None:
        found = self._failure(error)
        self._answer(
            number, ERROR, found.status, found.message, found.code, found.param, found.retry_after
        )

    def _answer(self, number: int, *rest: Any) -> None:
        if not self._is_closed:
            self._send([rest[0], number, *rest[1:]])
