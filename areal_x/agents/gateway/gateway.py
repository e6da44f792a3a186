"""The gateway: the run's own HTTP server, on the event loop of its rollout."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable

import gin

from areal_x.agents.chat.rendering import Renderer
from areal_x.agents.gateway.app import application
from areal_x.agents.gateway.connections import GatewayServer
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.session_state import SessionKeys, SessionLimits, same
from areal_x.errors import UserError, one_of, positive, within
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.workflow import Generator
from areal_x.runtime import background
from areal_x.runtime.waits import waiting, whose

LOOPBACK = "127.0.0.1"
ASK_AGAIN_SECONDS = 1.0

# takes the label that the agent gave, if any
OnOpen = Callable[[str | None], Awaitable[GatewaySession | None]]


@gin.configurable("gateway", denylist=["on_open"])
class Gateway:
    """Serves sessions to agents, on 127.0.0.1.

    Args:
        sampling: "run" samples with the run's parameters, whatever temperature, top_p or top_k an
            agent requests, because the trainer computes log-probabilities of that distribution;
            "client" lets the agent choose, if nothing is trained (areal_x.serve; a run refuses it).
            In both cases no completion is longer than the run allows.
        port: 0 chooses a free one.
        beat_seconds: Seconds between keep-alive events of a stream that waits for its completion.
        on_open: Returns the session of an agent that requests one with the gateway's own key (POST
            /sessions), or None while there is none; without it agents cannot request sessions.
    """

    def __init__(
        self,
        sampling: str = "run",
        port: int = 0,
        beat_seconds: float = 10.0,
        on_open: OnOpen | None = None,
    ) -> None:
        one_of("gateway.sampling", sampling, ("run", "client"))
        within("gateway.port", port, 0, 65535)
        positive("gateway.beat_seconds", beat_seconds)
        self.sampling = sampling
        self.port = port
        self.beat_seconds = beat_seconds
        self.on_open = on_open
        self.key = secrets.token_urlsafe(32)  # may open sessions, and nothing else
        self._keys: SessionKeys[GatewaySession] = SessionKeys()
        self._warned: set[str] = set()
        self._server: GatewayServer | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Known once the gateway has started."""
        return f"http://{LOOPBACK}:{self.port}"

    async def start(self) -> None:
        """Returns once the gateway accepts requests. Raises: UserError if the port is taken."""
        try:
            listener = socket.create_server((LOOPBACK, self.port), backlog=2048)
        except OSError as error:
            raise UserError(
                f"gateway.port = {self.port} cannot be served ({error.strerror}): 0 chooses a"
                " free one"
            ) from error
        self.port = listener.getsockname()[1]
        self._server = GatewayServer(application(self), listener)
        self._serving = background.start(self._server.serve(), "the gateway")
        ready = asyncio.create_task(self._server.ready.wait())
        with waiting(whose(), "the gateway to serve"):
            await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    def open(
        self,
        engine: Generator,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: SessionLimits | None = None,
    ) -> GatewaySession:
        """Opens a session with a key of its own.

        engine: the episode's view of it. sampling: the run's, with the tokens that end a
        completion.
        """
        id = secrets.token_hex(8)
        key = secrets.token_urlsafe(32)
        session = GatewaySession(
            id,
            key,
            f"{self.url}/sessions/{id}",
            engine,
            renderer,
            sampling,
            limits or SessionLimits(),
            policy=self.sampling,
            warned=self._warned,
            closed=self._keys.close,
        )
        self._keys.open(id, key, session)
        return session

    async def close(self) -> None:
        """Closes every session and then the server; safe to call twice and after a failed start."""
        for session in self._keys.things():
            session.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with waiting("the rollout", "the gateway to end"):
                await self._serving
        self._server = self._serving = None

    def is_open(self, client: tuple[str, int] | None) -> bool:
        """Returns True if this client's connection is open; for the routes."""
        return self._server is not None and self._server.is_open(client)

    def find(self, name: str | None, keys: list[str]) -> GatewaySession:
        """See SessionKeys.find; for the routes."""
        return self._keys.find(name, keys)

    def admit(self, keys: list[str]) -> None:
        """Raises: ApiError unless the client may request a session; for the routes."""
        if self.on_open is None:
            raise ApiError(404, "this run opens its own sessions", "no_such_route")
        if not any(same(key, self.key) for key in keys):
            raise ApiError(401, "opening a session needs the gateway's key", "invalid_api_key")

    async def open_waiting(self, label: str | None) -> GatewaySession:
        """Returns the session of an agent that may request one, with this label; for the routes."""
        assert self.on_open is not None
        if (session := await self.on_open(label)) is None:
            raise ApiError(
                503,
                "no episode waits for an agent now",
                "no_session",
                retry_after=ASK_AGAIN_SECONDS,
            )
        return session
