"""HTTP requests, as many at a time as this process may have connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from areal_x.errors import UserError
from areal_x.runtime import open_files

if TYPE_CHECKING:
    import aiohttp

# The server closes idle connections after 5 s; a client that keeps them longer reuses dead ones.
KEEP_ALIVE_SECONDS = 2.0
CONNECT_SECONDS = 30.0
ATTEMPTS = 3
FILES_SECONDS = 60.0  # descriptors become free as other requests end
FILES_POLL_SECONDS = 0.1
JSON = {"Content-Type": "application/json"}

_request_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    WeakKeyDictionary()
)


class OutOfFiles(UserError):
    """No file descriptor is left for a connection; implies nothing about the server."""


def session(key: str | None) -> aiohttp.ClientSession:
    """Returns a client session. Call it inside the event loop that uses it."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        cookie_jar=aiohttp.DummyCookieJar(),  # to look for cookies takes time at each request
    )


def request_slots() -> asyncio.Semaphore:
    """Returns the event loop's semaphore of requests in flight, to any server.

    Control requests (heartbeats, pauses, weights) take none: they must not wait for generation.
    """
    return _request_slots.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(open_files.connections())
    )


async def exchange(
    session: aiohttp.ClientSession,
    server: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    seconds: float | None,
    retry: bool = False,
    takes_slot: bool = False,
) -> tuple[int, bytes]:
    """Sends a request and returns the status and body of the server's response.

    body: of the request, JSON. retry: the request may be sent again if the connection
    breaks before any response. takes_slot: acquires one of `request_slots`.

    Raises: ConnectionError if there is no response; OutOfFiles.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
    headers = None if body is None else JSON
    named = f"the vLLM server at {server}"
    async with request_slots() if takes_slot else nullcontext():
        began, attempts = time.monotonic(), ATTEMPTS if retry else 1
        while True:
            if session.closed:
                raise ConnectionError(f"the connection to {named} was closed before {path}")
            try:
                async with session.request(
                    method, server + path, data=body, headers=headers, timeout=timeout
                ) as answer:
                    return answer.status, await answer.read()
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
    limit = f"this process has {open_files.allowed()} files open, its limit"
    return OutOfFiles(
        f"no connection to {server} can be opened: {limit}; raise `ulimit -n` or lower"
        " vllm.concurrency"
    )
