"""What a container is, whoever runs it: a file system with commands that run in it, one after the
other, and files that are copied in and out.

    container = await containers.start("python:3.12")
    await container.copy_in(archive, "repository")
    result = await container.run(["python", "-m", "pytest"], directory="repository")
    patch = await container.copy_out("patch")
    await container.stop()

Paths are relative to the container's own folder, or absolute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_x.sandbox.folder import CommandResult


class ContainerError(RuntimeError):
    """A container that did not start, ended too early, or did not do what it was asked for."""


class Container(Protocol):
    """A running container. Its commands run one after the other; processes that a command leaves
    behind may end with it.

    Nothing that a command does raises. Every method but `stop` raises ContainerError if the
    container is lost or exceeds a limit on what is copied.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        directory: str = ".",
        seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs the words of a command, which no shell parses, and returns standard output and
        standard error together.

        seconds: at most `containers.seconds`, which is the default. variables: more variables of
        its environment.
        """
        ...

    async def copy_in(self, archive: bytes, directory: str = ".") -> None:
        """Unpacks a tar archive, which is not compressed, in a directory, which is made if
        necessary."""
        ...

    async def copy_out(self, path: str) -> bytes:
        """Returns the content of a file."""
        ...

    async def stop(self) -> None:
        """Removes the container. Safe to call twice."""
        ...


class Containers(Protocol):
    """What runs containers."""

    async def start(self, image: str | None = None) -> Container:
        """Starts a container. image: what its file system holds at first, by default
        `containers.image`. Raises: ContainerError; UserError where none can ever start."""
        ...

    async def close(self) -> None:
        """Removes what is left."""
        ...
