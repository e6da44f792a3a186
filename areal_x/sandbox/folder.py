"""A folder of files in the sandbox, on which commands run one after the other.

    sandbox = sandbox_for(limits, folder_mb=4, workers=4)
    folder = Folder(sandbox, limits, {"a.txt": "hello"})
    await folder.run("mv a.txt b.txt")

Each command is a process of its own (docs/sandbox.md); between commands the folder is an archive in
this process's memory, which is unpacked only in the sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_x.sandbox import shell
from areal_x.sandbox.pool import Programs, Sandbox, SandboxLimits

PROGRAM = inspect.getsource(shell)
PACKING_SECONDS = 10.0  # for the archive, in addition to the command's time
BASE64 = 4 / 3  # characters per byte


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. code: its exit status; None if it was killed. output: what it
    printed."""

    output: str
    code: int | None
    error: str | None = None

    def text(self) -> str:
        """Returns the text that the model reads."""
        ended = self.error or (f"exit status {self.code}" if self.code else None)
        return (
            "\n".join(part for part in (self.output.rstrip("\n"), ended) if part)
            or "(the command printed nothing)"
        )


class FolderFull(RuntimeError):
    """Files that exceed the limits of a folder."""


class Folder:
    """The files of one episode, on which commands run one after the other. sandbox: from
    `sandbox_for` with the same limits.

    The files are an archive, at most as large as that sandbox allows, however large they are when
    it is unpacked for a command.
    """

    def __init__(
        self, sandbox: Programs, limits: SandboxLimits, files: Mapping[str, str | bytes]
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._archive = _text(pack_files(files))
        self._lock = asyncio.Lock()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        directory: str = ".",
        seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs a command and keeps its changes. A command that exceeds the limits on memory, files
        or processes leaves the files unchanged.

        command: a text for the shell, or the words of a command that no shell parses. directory:
        below the folder. seconds: at most those of the limits, which are the default. variables:
        more variables of its environment.
        """
        more = {"directory": directory, "variables": dict(variables or {})}
        async with self._lock:
            result, reply = await self._run(command, seconds, **more)
            if reply is not None:
                self._archive = reply["archive"]
            return result

    async def run_test(self, command: str) -> CommandResult:
        """Runs a command and discards its changes, so any number may run at once. It reads no
        settings from the folder, and no module there replaces one of Python's own."""
        return (await self._run(command, None, test=True, keep=False))[0]

    async def add(self, archive: bytes, directory: str = ".") -> None:
        """Unpacks a tar archive in a directory below the folder. Raises: FolderFull."""
        async with self._lock:
            result, reply = await self._run(None, None, add=[[_text(archive), directory]])
            if reply is None:
                raise FolderFull(result.error)
            self._archive = reply["archive"]

    async def read(self, path: str, most: int) -> bytes | None:
        """Returns the content of a file; None if there is none. most: largest size, in bytes.

        Raises: FolderFull for a larger one.
        """
        async with self._lock:
            result, reply = await self._run(None, None, read=path, bytes=most, keep=False)
        if reply is None or reply["size"] > most:
            raise FolderFull(result.error or f"{path} has {reply and reply['size']} bytes")
        content = reply["content"]
        return None if content is None else base64.b64decode(content)

    async def _run(
        self, command: str | Sequence[str] | None, seconds: float | None, **more: Any
    ) -> tuple[CommandResult, dict[str, Any] | None]:
        """Returns the result, and the reply of the program if there was one."""
        limits = self._limits
        seconds = min(limits.seconds, seconds or limits.seconds)
        request: dict[str, Any] = {
            "archive": self._archive,
            "add": (),
            "command": command,
            "directory": ".",
            "variables": {},
            "seconds": seconds,
            "characters": limits.output_characters,
            "test": False,
            "read": None,
            "bytes": 0,
            "keep": True,
        }
        result = await self._sandbox.run(PROGRAM, json.dumps({**request, **more}))
        if result.status != "ok" or result.truncated:
            why = (
                "the folder would grow beyond its limit"
                if result.error is None
                else result.error.splitlines()[-1]
            )
            error = f"{why}: the files are as they were before this command"
            return CommandResult("", None, error), None
        reply = json.loads(result.output)
        late = f"the command was ended after {seconds:g} seconds" if reply["code"] is None else None
        return CommandResult(reply["output"], reply["code"], late), reply


def sandbox_for(limits: SandboxLimits, folder_mb: float, workers: int) -> Sandbox:
    """Returns a sandbox whose programs have, in addition to a command's limits, the time and the
    output that the archive takes."""
    room = limits.output_characters + int(folder_mb * 1e6 * BASE64)
    return Sandbox(
        replace(limits, seconds=limits.seconds + PACKING_SECONDS, output_characters=room), workers
    )


def pack_files(files: Mapping[str, str | bytes]) -> bytes:
    """Returns a tar of these files, readable by everyone and owned by root."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return packed.getvalue()


def _text(archive: bytes) -> str:
    return base64.b64encode(archive).decode()
