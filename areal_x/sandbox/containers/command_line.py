"""Containers by the command line of podman or Docker.

A container has no network unless `containers.network`, no capabilities, a limit on memory,
processors and processes, and ends by itself after `containers.life_seconds`, also if the run was
killed.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal_x.runtime.waits import waiting, whose
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import made

LABEL = "areal-x"
# As the first process: reaps what others leave behind, survives `kill -1`, and ends in time.
LIVE = 'i=0; while [ "$i" -lt "$1" ]; do sleep 1; i=$((i + 1)); done'
WORKS_SECONDS = 10.0  # to find out whether the program works
REMOVE_SECONDS = 60.0
AT_ONCE = 1 << 16  # bytes


def works(program: str) -> bool:
    """True if the program is installed and can run containers here. Blocks for up to 10 seconds."""
    if shutil.which(program) is None:
        return False
    # Docker's own fields differ; both print something only if the service behind them answers
    with suppress(subprocess.SubprocessError):
        done = subprocess.run(
            [program, "info"], capture_output=True, timeout=WORKS_SECONDS, check=False
        )
        return done.returncode == 0
    return False


def start_words(program: str, image: str, limits: ContainerLimits) -> list[str]:
    """Returns the command that starts a container and prints its id."""
    memory = f"{int(limits.memory_mb * 1e6)}b"
    return [
        *(program, "run", "--detach", "--rm", "--label", LABEL),
        *("--memory", memory, "--memory-swap", memory),
        *("--cpus", f"{limits.processors:g}", "--pids-limit", str(limits.processes)),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *(() if limits.network else ("--network", "none")),
        *("--entrypoint", "sh", image, "-c", LIVE, "sh", str(int(limits.life_seconds))),
    ]


class CommandLineContainers:
    """Containers (areal_x.sandbox.containers.container) of podman or Docker. program: its name, or
    its path."""

    def __init__(self, program: str, image: str, limits: ContainerLimits) -> None:
        self._program = program
        self._image = image
        self._limits = limits

    async def start(self, image: str | None = None) -> Container:
        """Starts a container. Raises: ContainerError."""
        limits = self._limits
        if (image or self._image).startswith("-"):  # it would be an option, such as --privileged
            raise ContainerError(f"{image or self._image!r} is no name of an image")
        words = start_words(self._program, image or self._image, limits)
        with waiting(whose(), "its container to start", image or self._image):
            printed = await run_words(words, limits.start_seconds, AT_ONCE)
            machine = CommandLineMachine(self._program, printed.decode().split()[-1])
            return await made(machine, limits)

    async def close(self) -> None:
        """Does nothing: each container is removed by its owner, or ends by itself."""


@dataclass(frozen=True)
class CommandLineMachine:
    """A Machine (areal_x.sandbox.containers.remote). name: its id."""

    program: str
    name: str

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        return await run_words([self.program, "exec", self.name, *words], seconds, most)

    async def upload(self, path: str, content: bytes) -> None:
        words = [self.program, "exec", "--interactive", self.name, "sh", "-c", 'cat >"$1"']
        await run_words([*words, "sh", path], REMOVE_SECONDS, AT_ONCE, content)

    async def download(self, path: str, most: int) -> bytes:
        words = [self.program, "exec", self.name, "head", "-c", str(most), path]
        return await run_words(words, REMOVE_SECONDS, most)

    async def remove(self) -> None:
        with suppress(ContainerError):  # it is already gone
            words = [self.program, "rm", "--force", "--time", "0", self.name]
            if self.program.endswith("docker"):
                words = [self.program, "rm", "--force", self.name]
            await run_words(words, REMOVE_SECONDS, AT_ONCE)


async def run_words(words: Sequence[str], seconds: float, most: int, stdin: bytes = b"") -> bytes:
    """Returns at most `most` bytes of a program's standard output.

    Raises: ContainerError with the end of its standard error if its exit status is not 0, or it
    takes longer.
    """
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is the run's to handle
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds):
            printed, complained, _ = await asyncio.gather(
                _read(process.stdout, most),
                _read(process.stderr, AT_ONCE),
                _write(process.stdin, stdin),
            )
            code = await process.wait()
    except TimeoutError:
        raise ContainerError(
            f"{words[0]} {words[1]} did not answer within {seconds:g} seconds"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if code:
        text = " ".join(complained.decode(errors="replace").split())[-400:]
        raise ContainerError(f"{words[0]} {words[1]}: {text or f'exit status {code}'}")
    return printed


async def _read(stream: asyncio.StreamReader, most: int) -> bytes:
    """Reads to the end, and returns the first `most` bytes."""
    kept = b""
    while more := await stream.read(AT_ONCE):
        kept += more[: most - len(kept)]
    return kept


async def _write(stream: asyncio.StreamWriter, content: bytes) -> None:
    with suppress(ConnectionError):  # it ended without reading
        stream.write(content)
        await stream.drain()
    stream.close()
