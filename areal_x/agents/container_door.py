"""A socket by which an agent's program reaches the container of its episode, and nothing else.

The program finds the socket in AREAL_X_CONTAINER. A connection carries one request and one answer,
a line of JSON each:

    {"command": "ls -la", "directory": "src", "seconds": 30}
    {"output": "…", "code": 0, "error": null}

The container, and the keys of the platform that runs it, stay in the run.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from areal_x.sandbox.containers.container import Container, ContainerError

VARIABLE = "AREAL_X_CONTAINER"
SHELL = 'command -v bash >/dev/null && exec bash -c "$1"; exec sh -c "$1"'
REQUEST_BYTES = 4 << 20
REQUEST_SECONDS = 60.0  # for a request to arrive


@asynccontextmanager
async def open_door(container: Container, directory: str) -> AsyncIterator[str]:
    """Opens a door to a container for as long as the context lasts, and yields its address, which
    only this user can reach. directory: where commands run, and where their directories begin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    line = await reader.readline()
                writer.write(await _reply(container, directory, line))
                async with asyncio.timeout(REQUEST_SECONDS):
                    await writer.drain()
            except (TimeoutError, ValueError):  # no request, or one that is too long
                pass
            finally:
                writer.close()

    with tempfile.TemporaryDirectory(prefix="areal_x_door_") as folder:  # others cannot enter it
        path = str(Path(folder, "socket"))
        server = await asyncio.start_unix_server(answer, path, limit=REQUEST_BYTES)
        try:
            yield path
        finally:
            server.close()


async def _reply(container: Container, directory: str, line: bytes) -> bytes:
    try:
        request = json.loads(line)
        command, seconds = request["command"], request.get("seconds")
        if not isinstance(command, str) or not isinstance(seconds, int | float | None):
            raise TypeError("a request has a text `command` and a number `seconds`")
        result = await container.run(
            ["sh", "-c", SHELL, "sh", command],
            directory=posixpath.join(directory, str(request.get("directory") or "")),
            seconds=seconds,
            variables={str(n): str(x) for n, x in (request.get("variables") or {}).items()},
        )
        reply = {"output": result.output, "code": result.code, "error": result.error}
    except (ContainerError, ValueError, TypeError, KeyError, AttributeError) as error:
        reply = {"output": "", "code": None, "error": f"{type(error).__name__}: {error}"}
    return json.dumps(reply).encode() + b"\n"
