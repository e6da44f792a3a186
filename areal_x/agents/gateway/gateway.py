"""The gateway: the run's own HTTP server, on the event loop of its rollout or in worker processes."""

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
from areal_x.agents.gateway.network import LOOPBACK, Encryption, Network, key_in
from areal_x.agents.gateway.record import OwnHost
from areal_x.agents.gateway.session import GatewaySession
from areal_x.agents.gateway.session_state import SessionKeys, SessionLimits, same
from areal_x.agents.gateway.work import WorkSource
from areal_x.agents.gateway.worker import described
from areal_x.agents.gateway.workers import Workers
from areal_x.errors import UserError, one_of, positive, within
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.workflow import Generator
from areal_x.runtime import background
from areal_x.runtime.thread import in_thread
from areal_x.runtime.waits import waiting, whose

ASK_AGAIN_SECONDS = 1.0
MOST_WORKERS = 64

# takes the label that the agent gave, if any
OnOpen = Callable[[str | None], Awaitable[GatewaySession | None]]


@gin.configurable("gateway", denylist=["on_open", "on_work"])
class Gateway:
    """Serves sessions to agents: to those of this machine, on 127.0.0.1, unless `host` is set.

    Args:
        sampling: "run" samples with the run's parameters, whatever temperature, top_p or top_k an
            agent requests, because the trainer computes log-probabilities of that distribution;
            "client" lets the agent choose, if nothing is trained (areal_x.serve; a run refuses it).
            In both cases no completion is longer than the run allows.
        host: Address to listen on, in numbers. One that other machines can reach needs
            `certificate`, or `tls_by_proxy`; "0.0.0.0" and "::" are all of this machine.
        port: 0 chooses a free one.
        url: Address that agents are told, if it is not that of `host` and `port`: a proxy's, or the
            name in the certificate, such as "https://run.example.com:8443".
        certificate: PEM file with the certificate of `url`'s host, followed by those of its
            authorities. With it the gateway serves HTTPS alone.
        certificate_key: PEM file with the certificate's key; by default the same file.
        tls_by_proxy: True if a proxy ends the encryption and passes plain HTTP on to a `host` other
            than this machine; `networks` must then be the proxy's address.
        networks: Networks that may connect, such as ("10.0.0.0/8", "192.168.7.3/32"); other
            addresses are refused before they can say anything. Without any, keys alone decide.
        key_variable: Name of the environment variable with the gateway's own key, which opens
            sessions and takes episodes; by default it is random, and in the address file.
        beat_seconds: Seconds between keep-alive events of a stream that waits for its completion.
        workers: Processes that serve requests, for many agents or long conversations; 0 has the
            run's own process serve them, on the event loop of its rollout. Sessions, keys and calls
            stay in the run's process.
        on_open: Returns the session of an agent that requests one with the gateway's own key (POST
            /sessions), or None while there is none; without it agents cannot request sessions.
        on_work: Where workers get episodes from, with the same key (POST /work); None if this run
            gives out none.
    """

    def __init__(
        self,
        sampling: str = "run",
        host: str = LOOPBACK,
        port: int = 0,
        url: str = "",
        certificate: str = "",
        certificate_key: str = "",
        tls_by_proxy: bool = False,
        networks: tuple[str, ...] = (),
        key_variable: str = "",
        beat_seconds: float = 10.0,
        workers: int = 0,
        on_open: OnOpen | None = None,
        on_work: WorkSource | None = None,
    ) -> None:
        one_of("gateway.sampling", sampling, ("run", "client"))
        within("gateway.port", port, 0, 65535)
        positive("gateway.beat_seconds", beat_seconds)
        within("gateway.workers", workers, 0, MOST_WORKERS)
        self.sampling = sampling
        self.network = Network(
            host=host,
            url=url,
            certificate=certificate,
            certificate_key=certificate_key,
            tls_by_proxy=tls_by_proxy,
            networks=networks,
        )
        self.port = port
        self.key_variable = key_variable
        self.beat_seconds = beat_seconds
        self.workers = workers
        self.on_open = on_open
        self.on_work = on_work
        self.key = secrets.token_urlsafe(32)  # may open sessions and take episodes, nothing else
        self._keys: SessionKeys[GatewaySession] = SessionKeys()
        self._warned: set[str] = set()
        self._encryption: Encryption | None = None
        self._server: GatewayServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._workers: Workers | None = None
        self._renderer: Renderer | None = None  # the workers'

    @property
    def url(self) -> str:
        """Known once the gateway has started."""
        return self.network.told_url(self.port)

    def prepare(self) -> None:
        """Reads the certificate and the key, before a run loads its model. Raises: UserError for
        files or a variable that cannot be used."""
        self._encryption = self.network.encryption()
        if self.key_variable:
            self.key = key_in(self.key_variable)

    async def start(self, renderer: Renderer | None = None) -> None:
        """Returns once the gateway accepts requests. renderer: of all sessions, which worker
        processes need. Raises: UserError if the port is taken or a worker cannot start, and as
        `prepare`."""
        self.prepare()
        about = {}
        if self.workers:
            if renderer is None:
                raise UserError("gateway.workers needs the renderer of its sessions at the start")
            about = await in_thread(described, renderer)
        host = self.network.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(
                (host, self.port),
                family=family,
                backlog=2048,
                dualstack_ipv6=self.network.is_everywhere
                and family == socket.AF_INET6
                and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise UserError(
                f"gateway.host = {host!r} with gateway.port = {self.port} cannot be served"
                f" ({error.strerror}): the address must be this machine's, and port 0 chooses a free"
                " one"
            ) from error
        self.port = listener.getsockname()[1]
        if self.workers:
            self._renderer = renderer
            self._workers = Workers(self, listener, about)
            await self._workers.start()
            return
        self._server = GatewayServer(
            application(OwnHost(self)), listener, self._encryption, self.network.admits
        )
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
        if self._workers is not None and renderer is not self._renderer:
            raise UserError("a gateway with workers has the one renderer that it was started with")
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
        if self._workers is not None:
            await self._workers.close()
        self._server = self._serving = self._workers = None

    def is_open(self, client: tuple[str, int] | None) -> bool:
        """Returns True if this client's connection is open; for the routes."""
        return self._server is not None and self._server.is_open(client)

    def find(self, name: str | None, keys: list[str]) -> GatewaySession:
        """See SessionKeys.find; for the routes."""
        return self._keys.find(name, keys)

    def session(self, id: str) -> GatewaySession:
        """Returns an open session that `find` returned before; for worker processes. Raises:
        ApiError once it is closed."""
        return self._keys.named(id)

    def admit(self, keys: list[str]) -> None:
        """Raises: ApiError unless the client may request a session; for the routes."""
        self._check_key(keys, "opening a session")
        if self.on_open is None:
            raise ApiError(404, "this run opens its own sessions", "no_such_route")

    def work_for(self, keys: list[str]) -> WorkSource:
        """Returns what gives workers episodes; for the routes. Raises: ApiError."""
        self._check_key(keys, "taking episodes")
        if self.on_work is None:
            raise ApiError(
                404,
                "this run gives no episodes to workers: it needs train.workflow = @remote_agent()",
                "no_such_route",
            )
        return self.on_work

    def _check_key(self, keys: list[str], what: str) -> None:
        if not any(same(key, self.key) for key in keys):
            raise ApiError(401, f"{what} needs the gateway's key", "invalid_api_key")

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
