"""The HTTP server of the API, which does not keep clients waiting while it ends."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

CLOSING_SECONDS = 2
MOST_CONNECTIONS = 2048  # clients keep a connection for each request that they wait for


class APIServer(uvicorn.Server):
    """Serves an application of `app.application`."""

    def __init__(self, application: Starlette) -> None:
        config = uvicorn.Config(
            application,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
        self._accounts = application.state.accounts

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends. Who waits for a result is told to ask again, of the server that is started next."""
        for account in self._accounts:
            account.futures.end_polls()
        await super().shutdown(sockets)
