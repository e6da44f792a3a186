"""The gateway's connections: bounds what anybody may cost it before a key is checked.

Whoever can open a socket can send endless headers, or nothing, over as many connections as there
are file descriptors. So headers are few, a request's must arrive soon, connections are fewer than
the process may have open files, and one of them feeds the parser no more per iteration of the loop
than it parses in milliseconds.

Where connections are encrypted, that comes first, in a task of each: a client that begins and stays
silent holds up nobody, and gives way like any other that has no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from areal_x.agents.gateway.network import Encryption
from areal_x.errors import UserError
from areal_x.runtime import background

LOG = logging.getLogger(__name__)

HEADER_BYTES = 1 << 14  # h11 takes 10 µs per header, and a header can be four bytes long
# received bytes that are parsed at once: they may hold a thousand chunks of one byte
SLICE_BYTES = 1 << 13
REQUEST_SECONDS = 10.0  # from a connection's first byte, or its opening, to the end of the headers
IDLE_SECONDS = 75  # longer than clients keep an unused connection
SHUTDOWN_SECONDS = 1.0  # for a client to confirm that an encrypted connection ends
CLOSING_SECONDS = 5  # for responses that are being sent as the gateway closes
LEAST, MOST = 16, 4096  # connections at once
# handshakes at once: each takes a millisecond of the loop's time (an RSA key; a tenth with ECDSA)
HANDSHAKES = 64
RETRY_SECONDS = 0.2  # after a failed accept, if no idle connection can be closed for it
WARNING_SECONDS = 60.0  # between two warnings in the log


def most_connections() -> int:
    """Returns half of this process's limit on open files: the rest is for the engine, and for
    files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else max(LEAST, min(MOST, files // 2))


class Connection(H11Protocol):
    """One connection, bounded."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._held = bytearray()
        self._feeding: asyncio.Handle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._held.clear()
        self._stop_waiting()
        super().connection_lost(error)

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._feeding is None:
            self._feed()

    def _feed(self) -> None:
        self._feeding = None
        if self.transport.is_closing():
            return
        piece = bytes(self._held[:SLICE_BYTES])
        del self._held[:SLICE_BYTES]
        super().data_received(piece)
        if self.is_busy:
            self._stop_waiting()
        elif self._late is None:  # further bytes do not extend the deadline
            self._wait()
        if self._held:
            self.transport.pause_reading()
            self._feeding = self.loop.call_soon(self._feed)
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _wait(self) -> None:
        self._late = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self.is_busy:
            self.transport.abort()


class GatewayServer(uvicorn.Server):
    """Serves an application on a listening socket. Leaves signals to the run, and sets an event
    when it is ready.

    encryption: of its connections; None for plain HTTP. admits: returns True for an address that
    may connect; others are refused before a byte of theirs is read.
    """

    def __init__(
        self,
        application: object,
        listener: socket.socket,
        encryption: Encryption | None = None,
        admits: Callable[[str], bool] = lambda address: True,
    ) -> None:
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=Connection,
            h11_max_incomplete_event_size=HEADER_BYTES,
            log_config=None,
            log_level="error",  # malformed HTTP gets a response, and no line of the log
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            # else a client could name its own address, in a header
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
        self.ready = asyncio.Event()
        self._listener = listener
        self._encryption = encryption
        self._admits = admits
        self._most = most_connections()
        self._open: dict[Connection, None] = {}  # in the order of arrival
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._warned_at = -WARNING_SECONDS

    def is_open(self, client: tuple[str, int] | None) -> bool:
        """Returns True if the connection of this client's address is open."""
        return client in self.clients()

    def clients(self) -> list[tuple[str, int]]:
        """Returns the addresses of the open connections."""
        return [made.client for made in self._connections() if made.client is not None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._listener.setblocking(False)
        self._accepting = background.start(self._accept(), "the gateway's accepting of connections")
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            ending = [self._accepting, *self._handshakes.values()]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        self._listener.close()
        await super().shutdown(sockets=[])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError as error:
                self._warn(f"the gateway cannot accept connections: {error.strerror}")
                await asyncio.sleep(0 if self._make_room() else RETRY_SECONDS)
                continue
            if not self._admits(address[0]):
                accepted.close()
                self._warn(
                    f"the gateway refused a connection from {address[0]}, which is in none of"
                    " gateway.networks"
                )
                await asyncio.sleep(0)  # accepting may not have
                continue
            if len(self._connections()) >= self._most and not self._make_room():
                accepted.close()
                self._warn(
                    f"the gateway answers {self._most} requests at once and refuses more: raise"
                    " `ulimit -n`"
                )
                await asyncio.sleep(0)
                continue
            made = self._connection()
            if self._encryption is None:
                await self._connect(made, accepted)
                continue
            try:
                self._encryption.renew(loop.time())
            except UserError as error:
                self._warn(f"the certificate cannot be renewed: {error}")
            if len(self._handshakes) >= HANDSHAKES:
                self._abandon(next(iter(self._handshakes)))
            self._handshakes[made] = background.start(
                self._connect(made, accepted), "a handshake of the gateway"
            )
            await asyncio.sleep(0)

    async def _connect(self, made: Connection, accepted: socket.socket) -> None:
        tls: dict[str, Any] = {}
        if self._encryption is not None:
            tls = {
                "ssl": self._encryption.context,
                "ssl_handshake_timeout": REQUEST_SECONDS,
                "ssl_shutdown_timeout": SHUTDOWN_SECONDS,
            }
        try:
            # A response's headers and body are two writes: without this the body would wait 40
            # ms for the client's acknowledgement of the headers.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: made, accepted, **tls)
        except OSError:  # the client is gone, or its handshake failed
            self._open.pop(made, None)
            accepted.close()
        finally:
            self._handshakes.pop(made, None)

    def _connection(self) -> Connection:
        made = Connection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self._open[made] = None
        return made

    def _abandon(self, connection: Connection) -> None:
        """Closes a connection without a request."""
        if connection.transport is not None:
            connection.transport.abort()
        elif (handshake := self._handshakes.pop(connection, None)) is not None:
            self._open.pop(connection, None)
            handshake.cancel()

    def _connections(self) -> dict[Connection, None]:
        for connection in [
            x for x in self._open if x.transport is not None and x.transport.is_closing()
        ]:
            del self._open[connection]
        return self._open

    def _make_room(self) -> bool:
        """Closes the connection that has been without a request for longest; returns False if each
        has one."""
        idle = next(
            (
                x
                for x in self._connections()
                if (x.transport is not None or x in self._handshakes) and not x.is_busy
            ),
            None,
        )
        if idle is not None:
            self._abandon(idle)
        return idle is not None

    def _warn(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            LOG.warning("%s", what)
