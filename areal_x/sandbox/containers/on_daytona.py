"""Containers of Daytona, by its SDK (`pip install daytona`, tried with 0.226; DAYTONA_API_KEY).

Experimental: tested against the interface of the SDK, never against the service.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from areal_x.errors import UserError
from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import made

COPY_SECONDS = 600
GIBIBYTE = 1 << 30


class DaytonaContainers:
    """Containers (areal_x.sandbox.containers.container) of Daytona."""

    def __init__(self, image: str, limits: ContainerLimits) -> None:
        """Raises: UserError if the SDK or its key is missing."""
        try:
            import daytona
        except ImportError:
            raise UserError(
                'containers.kind = "daytona" needs its SDK: pip install daytona'
            ) from None
        self._sdk: Any = daytona
        self._image = image
        self._limits = limits
        try:
            self._client = daytona.AsyncDaytona()
        except daytona.DaytonaError as error:
            raise UserError(f'containers.kind = "daytona": {error}') from None

    def parameters(self, image: str | None) -> Any:
        """Returns what the SDK needs to create a container of an image, or of its default."""
        sdk, limits = self._sdk, self._limits
        bounds = {
            "ephemeral": True,
            "auto_stop_interval": math.ceil(limits.life_seconds / 60),
            "ttl_minutes": math.ceil(limits.life_seconds / 60),
            "network_block_all": not limits.network,
            "labels": {"areal-x": "episode"},
        }
        if not image:
            return sdk.CreateSandboxFromSnapshotParams(**bounds)
        resources = sdk.Resources(
            cpu=math.ceil(limits.processors),
            memory=math.ceil(limits.memory_mb * 1e6 / GIBIBYTE),
            disk=math.ceil(limits.disk_mb * 1e6 / GIBIBYTE),
        )
        return sdk.CreateSandboxFromImageParams(image=image, resources=resources, **bounds)

    async def start(self, image: str | None = None) -> Container:
        """Starts a container. Raises: ContainerError."""
        limits = self._limits
        with waiting(whose(), "its container to start", image or self._image):
            try:
                sandbox = await self._client.create(
                    self.parameters(image or self._image), timeout=limits.start_seconds
                )
            except self._sdk.DaytonaError as error:
                raise ContainerError(f"Daytona: {error}") from error
            machine = DaytonaMachine(self._sdk, sandbox)
            return await made(machine, limits)

    async def close(self) -> None:
        """Ends the client's connections."""
        await self._client.close()


class DaytonaMachine:
    """A Machine (areal_x.sandbox.containers.remote). sandbox: the SDK's AsyncSandbox."""

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        self._sdk = sdk
        self._sandbox = sandbox

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        """The SDK takes a text for a shell: every word is quoted."""
        try:
            reply = await self._sandbox.process.exec(shlex.join(words), timeout=math.ceil(seconds))
        except self._sdk.DaytonaError as error:
            raise ContainerError(f"Daytona: {error}") from error
        printed: bytes = reply.result.encode(errors="replace")
        return printed[:most]

    async def upload(self, path: str, content: bytes) -> None:
        try:
            await self._sandbox.fs.upload_file(content, path, COPY_SECONDS)
        except self._sdk.DaytonaError as error:
            raise ContainerError(f"Daytona: {error}") from error

    async def download(self, path: str, most: int) -> bytes:
        content = b""
        try:
            parts = await self._sandbox.fs.download_file_stream(path, COPY_SECONDS)
            async for part in parts:
                content += part
                if len(content) >= most:
                    break
        except self._sdk.DaytonaError as error:
            raise ContainerError(f"Daytona: {error}") from error
        return content[:most]

    async def remove(self) -> None:
        with suppress(self._sdk.DaytonaError):  # gone, or ends by itself
            await self._sandbox.delete()
