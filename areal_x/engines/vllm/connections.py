"""Requests over HTTP, as many at a time as this process may have connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from areal_x.errors import UserError
from areal_x.runtime import open_files

if TYPE_CHECKING:
    import aiohttp

# the server closes idle connections after 5 s: a client that keeps them longer meets dead ones
KEEP_ALIVE_SECONDS = 2.0
CONNECT_SECONDS = 30.0
ATTEMPTS = 3
FILES_SECONDS = 60.0  # descriptors come back as other requests end
FILES_POLL_SECONDS = 0.1

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class OutOfFiles(UserError):
    """No connection can be made for want of a file descriptor: says nothing about the server."""


def session(key: str | None) -> aiohttp.ClientSession:
    """Made inside the event loop that uses it."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector, headers={"Authorization": f"Bearer {key}"} if key else {}
    )


def places() -> asyncio.Semaphore:
    """One for each request that may be in flight from this event loop, to whichever server.

    Requests that steer servers (heartbeats, pauses, weights) take none: they must not wait for
    those that generate.
    """
    return _places.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(open_files.connections())
    )


async def exchange(
    session: aiohttp.ClientSession,
    server: str,
    method: str,
    path: str,
    *,
    body: Any = None,
    seconds: float | None,
    retry: bool = False,
    waits: bool = False,
) -> tuple[int, str]:
    """The status and the text of a server's answer.

    retry: safe to send again when the connection breaks before any answer. waits: takes one of
    `places`. Raises: ConnectionError when none comes, OutOfFiles.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
    named = f"the vLLM server at {server}"
    async with places() if waits else nullcontext():
        began, attempts = time.monotonic(), ATTEMPTS if retry else 1
        while True:
            if session.closed:
                raise ConnectionError(f"the connection to {named} was closed before {path}")
            try:
                async with session.request(
                    method, server + path, json=body, timeout=timeout
                ) as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientOSError as error:
                if open_files.ran_out(getattr(error, "os_error", error)):
                    if time.monotonic() - began > min(FILES_SECONDS, seconds or FILES_SECONDS):
                        raise out_of_files(server) from error
                    await asyncio.sleep(FILES_POLL_SECONDS)
                elif isinstance(error, aiohttp.ClientConnectorError):
                    raise ConnectionError(
                        f"no vLLM server answers at {server}: {error.os_error.strerror or error}"
                    ) from error
                elif (attempts := attempts - 1) == 0:
                    raise ConnectionError(f"{named} broke the connection during {path}") from error
            except aiohttp.ServerDisconnectedError as error:
                if (attempts := attempts - 1) == 0:
                    raise ConnectionError(f"{named} broke the connection during {path}") from error
            except TimeoutError as error:
                raise ConnectionError(
                    f"{named} did not answer {path} within {seconds} s"
                ) from error
            except aiohttp.ClientError as error:
                raise ConnectionError(f"{named} failed during {path}: {error}") from error


def out_of_files(server: str) -> OutOfFiles:
    limit = f"this process has {open_files.allowed()} files open, all that it may"
    return OutOfFiles(
        f"no connection to {server} can be made, as {limit}: raise `ulimit -n`, or lower"
        " vllm.concurrency"
    )
