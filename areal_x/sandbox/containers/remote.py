"""Containers of a platform that runs a command and passes bytes in and out: podman, Docker,
Daytona, E2B.

The bounds on a command hold inside the container, so that they are the same everywhere: `timeout`
ends it, and its output goes to a file, of which the first and the last part are returned. A command
is a list of words everywhere; those of a model are arguments of a fixed script, never part of it.
The image needs `sh`, `tar`, coreutils and `setsid`, or Busybox.
"""

from __future__ import annotations

import asyncio
import math
import posixpath
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.containers.container import ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.folder import CommandResult

HOME = "/tmp/areal_x"  # of each container: where relative paths begin
ARCHIVE = f"{HOME}.tar"
GRACE_SECONDS = 30.0  # for a platform to report a command that was ended
TIMED_OUT = (124, 137)  # exit statuses of `timeout`
# $1: directory, $2: seconds, $3: half of the most bytes of output; then the words of the command.
# Prints its exit status and the size of its output, and then the output. What the command left
# behind in its session ends with it.
SCRIPT = """cd "$1" || { echo 127 0; exit; }
seconds=$2 half=$3 out=$(mktemp) && shift 3 || exit 1
setsid timeout -s KILL "$seconds" "$@" </dev/null >"$out" 2>&1 &
wait $!
code=$?
kill -9 -$! 2>/dev/null
size=$(wc -c <"$out")
echo "$code" $size
if [ $size -le $((2 * half)) ]; then cat "$out"
else head -c "$half" "$out"; tail -c "$half" "$out"; fi
rm -f "$out" """


class Machine(Protocol):
    """A running container, as its platform offers it. Each method raises ContainerError."""

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        """Returns at most `most` bytes of what the command printed, after at most so many
        seconds."""
        ...

    async def upload(self, path: str, content: bytes) -> None: ...

    async def download(self, path: str, most: int) -> bytes:
        """Returns a file's first `most` bytes."""
        ...

    async def remove(self) -> None: ...


class RemoteContainer:
    """A Container (areal_x.sandbox.containers.container) on a Machine."""

    def __init__(
        self, machine: Machine, *, seconds: float, output_characters: int, copy_mb: float
    ) -> None:
        self._machine = machine
        self._seconds = seconds
        self._output = output_characters
        self._copy_bytes = int(copy_mb * 1e6)
        self._lock = asyncio.Lock()
        self._removed = False

    async def run(
        self,
        command: Sequence[str],
        *,
        directory: str = ".",
        seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Runs a command. Raises: ContainerError if the container is lost."""
        allowed = min(self._seconds, seconds or self._seconds)
        words = [*command]
        if variables:
            words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
        half = self._output // 2
        script = ["sh", "-c", SCRIPT, "sh", posixpath.join(HOME, directory)]
        script += [str(math.ceil(allowed)), str(half), *words]
        began = time.monotonic()
        with waiting(whose(), "a command in its container", lambda: shown(command)):
            async with self._lock:
                printed = await self._machine.execute(
                    script, math.ceil(allowed) + GRACE_SECONDS, self._output + 100
                )
        return read_result(printed, half, allowed, time.monotonic() - began)

    async def copy_in(self, archive: bytes, directory: str = ".") -> None:
        """Unpacks an archive. Raises: ContainerError if it is too large, or cannot be unpacked."""
        if len(archive) > self._copy_bytes:
            raise ContainerError(
                f"an archive of {len(archive)} bytes is more than containers.copy_mb"
            )
        with waiting(whose(), "files of its container", f"{len(archive)} bytes"):
            async with self._lock:
                await self._machine.upload(ARCHIVE, archive)
        place = posixpath.join(HOME, directory)
        # as whoever unpacks, so that git trusts the files
        unpack = 'mkdir -p "$2" && tar -xof "$1" -C "$2" && rm -f "$1"'
        result = await self.run(["sh", "-c", unpack, "sh", ARCHIVE, place], directory=HOME)
        if result.code != 0:
            raise ContainerError(f"an archive could not be unpacked in {place}: {result.text()}")

    async def copy_out(self, path: str) -> bytes:
        """Returns the content of a file. Raises: ContainerError if it is missing or too large."""
        with waiting(whose(), "files of its container", path):
            async with self._lock:
                place = posixpath.join(HOME, path)
                content = await self._machine.download(place, self._copy_bytes + 1)
        if len(content) > self._copy_bytes:
            raise ContainerError(f"{path} has more bytes than containers.copy_mb")
        return content

    async def stop(self) -> None:
        if not self._removed:
            self._removed = True
            with waiting(whose(), "its container to end"):
                await self._machine.remove()


async def made(machine: Machine, limits: ContainerLimits) -> RemoteContainer:
    """Returns a container that has just started, with its folder. Raises: ContainerError if its image
    lacks what commands need."""
    check = 'mkdir -p "$1" && command -v setsid timeout tar head tail mktemp wc env >/dev/null && echo ok'
    printed = await machine.execute(["sh", "-c", check, "sh", HOME], GRACE_SECONDS, 1000)
    if printed.strip() != b"ok":
        await machine.remove()
        raise ContainerError(
            "the image of a container needs sh, tar, coreutils and setsid, or Busybox: "
            + printed.decode(errors="replace")[-200:]
        )
    return RemoteContainer(
        machine,
        seconds=limits.seconds,
        output_characters=limits.output_characters,
        copy_mb=limits.copy_mb,
    )


def read_result(printed: bytes, half: int, allowed: float, took: float) -> CommandResult:
    """Reads what SCRIPT printed. half: the size of each part of a long output. allowed, took:
    seconds.

    Raises: ContainerError for anything else.
    """
    first, _, rest = printed.partition(b"\n")
    numbers = first.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        words = " ".join(printed.decode(errors="replace").split())[-400:]
        raise ContainerError(f"the container did not run a command: {words or 'no answer'}")
    code, size = map(int, numbers)
    if size > 2 * half:
        head, tail = (part.decode(errors="replace") for part in (rest[:half], rest[half:]))
        note = f"[output truncated: {size} bytes, the first and the last {half} are shown]"
        output = f"{head}\n{note}\n{tail}"
    else:
        output = rest.decode(errors="replace")
    if code in TIMED_OUT and took >= allowed:
        return CommandResult(output, None, f"the command was ended after {allowed:g} seconds")
    return CommandResult(output, code)


def shown(command: Sequence[str]) -> str:
    """Returns the beginning of a command, for people."""
    text = shlex.join(command)
    return text if len(text) <= 60 else f"{text[:60]}…"
