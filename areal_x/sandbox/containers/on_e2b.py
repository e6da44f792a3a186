"""Containers of E2B, by its SDK (`pip install e2b`, tried with 2.56; E2B_API_KEY).

An image is a template of E2B's, whose memory and processors are its own. Experimental: tested
against the interface of the SDK, never against the service.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from areal_x.errors import UserError
from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import made

KEY = "E2B_API_KEY"
COPY_SECONDS = 600.0


class E2BContainers:
    """Containers (areal_x.sandbox.containers.container) of E2B."""

    def __init__(self, template: str, limits: ContainerLimits) -> None:
        """Raises: UserError if the SDK or its key is missing."""
        try:
            import e2b
        except ImportError:
            raise UserError('containers.kind = "e2b" needs its SDK: pip install e2b') from None
        if not os.environ.get(KEY):
            raise UserError(f'containers.kind = "e2b" needs a key in {KEY}')
        self._sdk: Any = e2b
        self._template = template
        self._limits = limits

    async def start(self, image: str | None = None) -> Container:
        """Starts a container of a template. Raises: ContainerError."""
        limits = self._limits
        with waiting(whose(), "its container to start", image or self._template):
            try:
                sandbox = await self._sdk.AsyncSandbox.create(
                    template=image or self._template or None,
                    timeout=math.ceil(limits.life_seconds),
                    metadata={"areal-x": "episode"},
                    allow_internet_access=limits.network,
                    request_timeout=limits.start_seconds,
                )
            except errors(self._sdk) as error:
                raise ContainerError(f"E2B: {error}") from error
            machine = E2BMachine(self._sdk, sandbox)
            return await made(machine, limits)

    async def close(self) -> None:
        """Does nothing: each container is removed by its owner, or ends by itself."""


class E2BMachine:
    """A Machine (areal_x.sandbox.containers.remote). sandbox: the SDK's AsyncSandbox."""

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        self._sdk = sdk
        self._sandbox = sandbox

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        """The SDK takes a text for a shell: every word is quoted."""
        try:
            reply = await self._sandbox.commands.run(shlex.join(words), timeout=seconds)
        except self._sdk.CommandExitException as ended:
            reply = ended
        except errors(self._sdk) as error:
            raise ContainerError(f"E2B: {error}") from error
        printed: bytes = reply.stdout.encode(errors="replace")
        return printed[:most]

    async def upload(self, path: str, content: bytes) -> None:
        try:
            await self._sandbox.files.write(path, content, request_timeout=COPY_SECONDS)
        except errors(self._sdk) as error:
            raise ContainerError(f"E2B: {error}") from error

    async def download(self, path: str, most: int) -> bytes:
        content = b""
        try:
            reader = await self._sandbox.files.read(
                path, format="stream", request_timeout=COPY_SECONDS
            )
            async with reader:
                async for part in reader:
                    content += part
                    if len(content) >= most:
                        break
        except errors(self._sdk) as error:
            raise ContainerError(f"E2B: {error}") from error
        return content[:most]

    async def remove(self) -> None:
        with suppress(*errors(self._sdk)):  # gone, or ends by itself
            await self._sandbox.kill()


def errors(sdk: Any) -> tuple[type[Exception], ...]:
    """Returns the exceptions of the SDK, which have no base of their own, and of its client."""
    import httpx

    return sdk.SandboxException, sdk.AuthenticationException, httpx.HTTPError
