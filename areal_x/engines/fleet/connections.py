"""HTTP requests, as many at a time as this process may have connections."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing, nullcontext, suppress
from typing import Any

from areal_x.engines.fleet.failures import ServerLost
from areal_x.engines.fleet.http import Answer, Disconnected, Pool, Unreachable
from areal_x.engines.fleet.request_slots import request_slots
from areal_x.errors import UserError
from areal_x.runtime import open_files
from areal_x.runtime.waits import waiting, whose

ATTEMPTS = 3
FILES_SECONDS = 60.0  # descriptors become free as other requests end
FILES_POLL_SECONDS = 0.1


class OutOfFiles(UserError):
    """No file descriptor is left for a connection; implies nothing about the server."""


async def exchange(
    pool: Pool,
    server: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    seconds: float | None,
    retry: bool = False,
    takes_slot: bool = False,
) -> Answer:
    """Sends a request and returns the status and body of the server's response.

    body: of the request, JSON. retry: the request may be sent again if the connection
    breaks before any response. takes_slot: waits for one of `request_slots`.

    Raises: ConnectionError if there is no response; OutOfFiles.
    """
    named = f"the {pool.kind} server at {server}"
    async with request_slots().of(server) if takes_slot else nullcontext():
        began, attempts = time.monotonic(), ATTEMPTS if retry else 1
        while True:
            if pool.closed:
                raise ConnectionError(f"the connection to {named} was closed before {path}")
            try:
                async with asyncio.timeout(seconds):
                    return await pool.request(method, path, body)
            except Unreachable as error:
                if not open_files.ran_out(error.reason):
                    raise ConnectionError(
                        f"no {pool.kind} server answers at {server}: {error}"
                    ) from error
                if time.monotonic() - began > min(FILES_SECONDS, seconds or FILES_SECONDS):
                    raise out_of_files(server, pool.kind) from error
                await asyncio.sleep(FILES_POLL_SECONDS)
            except Disconnected as error:
                if (attempts := attempts - 1) == 0:
                    raise ConnectionError(f"{named} broke the connection during {path}") from error
            except TimeoutError as error:
                raise ConnectionError(
                    f"{named} did not answer {path} within {seconds} s"
                ) from error
            except ConnectionError as error:
                raise ConnectionError(f"{named} failed during {path}: {error}") from error


async def answer_of(pool: Pool, server: str, method: str, path: str, **how: Any) -> Answer:
    """Returns what `exchange` does, with a name for the wait. how: see there.

    Raises: ServerLost if there is no response; OutOfFiles.
    """
    try:
        with waiting(whose(), f"the server at {server} to answer {path}"):
            return await exchange(pool, server, method, path, **how)
    except ConnectionError as error:
        raise ServerLost(f"{error}") from error


async def status_of(pool: Pool, server: str, path: str, seconds: float) -> int | None:
    """Returns the status of a GET; None if there is no response in time. Raises: OutOfFiles."""
    try:
        with waiting(whose(), f"a sign of life from {server}", idle=True):
            status, _ = await exchange(pool, server, "GET", path, seconds=seconds)
    except ConnectionError:
        return None
    return status


async def status_without_key(
    kind: str, server: str, method: str, path: str, *, body: bytes | None = None, seconds: float
) -> int | None:
    """Returns the status of a request without a key; None if there is no response in time. kind: the
    program's name."""
    with closing(Pool(server, None, kind)) as stranger, suppress(ConnectionError):
        status, _ = await exchange(stranger, server, method, path, body=body, seconds=seconds)
        return status
    return None


def out_of_files(server: str, kind: str) -> OutOfFiles:
    limit = f"this process has {open_files.allowed()} files open, its limit"
    return OutOfFiles(
        f"no connection to {server} can be opened: {limit}; raise `ulimit -n` or lower"
        f" {kind.lower()}.concurrency"
    )
