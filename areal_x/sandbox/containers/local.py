"""Containers without a container runtime: a folder in the sandbox of this machine.

They have no image: commands see the programs of this machine, read-only, and one folder, which is
packed between commands. Paths outside of the folder do not last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_x.errors import UserError
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.folder import CommandResult, Folder, FolderFull, sandbox_for
from areal_x.sandbox.pool import SandboxLimits

WORKERS = 4  # commands at once, in all containers together
FILES = 50_000


class LocalContainers:
    """Containers (areal_x.sandbox.containers.container) in the sandbox."""

    def __init__(self, limits: ContainerLimits, workers: int = WORKERS) -> None:
        self._limits = SandboxLimits(
            seconds=limits.seconds,
            cpu_seconds=limits.seconds,
            memory_mb=limits.memory_mb,
            output_characters=limits.output_characters,
            processes=limits.processes,
            file_mb=limits.disk_mb,
            files=FILES,
        )
        self._copy_bytes = int(limits.copy_mb * 1e6)
        self._sandbox = sandbox_for(self._limits, limits.disk_mb, workers)

    async def start(self, image: str | None = None) -> Container:
        """Starts a container. Raises: UserError for an image, and as Sandbox.start."""
        if image:
            raise UserError(
                f"a container of the image {image!r} needs podman, Docker, Daytona or E2B"
                " (containers.kind): the local sandbox has no images"
            )
        await self._sandbox.start()
        return LocalContainer(Folder(self._sandbox, self._limits, {}), self._copy_bytes)

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()


class LocalContainer:
    """A Container (areal_x.sandbox.containers.container) that is a folder."""

    def __init__(self, folder: Folder, copy_bytes: int) -> None:
        self._folder = folder
        self._copy_bytes = copy_bytes

    async def run(
        self,
        command: Sequence[str],
        *,
        directory: str = ".",
        seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs a command. It keeps no changes if it exceeds a limit other than time."""
        return await self._folder.run(
            [*command], directory=directory, seconds=seconds, variables=variables
        )

    async def copy_in(self, archive: bytes, directory: str = ".") -> None:
        """Unpacks an archive. Raises: ContainerError."""
        if len(archive) > self._copy_bytes:
            raise ContainerError(
                f"an archive of {len(archive)} bytes is more than containers.copy_mb"
            )
        try:
            await self._folder.add(archive, directory)
        except FolderFull as error:
            raise ContainerError(f"an archive cannot be unpacked: {error}") from None

    async def copy_out(self, path: str) -> bytes:
        """Returns the content of a file. Raises: ContainerError."""
        try:
            content = await self._folder.read(path, self._copy_bytes)
        except FolderFull as error:
            raise ContainerError(f"{path} cannot be copied: {error}") from None
        if content is None:
            raise ContainerError(f"{path} cannot be copied: there is no such file")
        return content

    async def stop(self) -> None:
        """Does nothing: between commands there is no process, and the folder is in memory."""
