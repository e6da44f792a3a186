"""Containers to test with: every kind that works here, and a Machine that is this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_x.sandbox.containers import remote
from areal_x.sandbox.containers.choice import containers_of
from areal_x.sandbox.containers.command_line import run_words, works
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import made

KINDS = ("local", "here", "podman", "docker")
IMAGE = "localhost/areal-x-test"  # has sh, tar, git and coreutils or Busybox
LIMITS = ContainerLimits(kind="local", image="", seconds=20.0, disk_mb=16.0, copy_mb=2.0, output_characters=2000)


class HereMachine:
    """A Machine whose commands run on this one, without any isolation: it shows that the scripts of
    areal_x.sandbox.containers.remote do what they should in a real shell."""

    def __init__(self) -> None:
        self.removed = False

    async def execute(self, words: Sequence[str], seconds: float, most: int) -> bytes:
        return await run_words(words, seconds, most)

    async def upload(self, path: str, content: bytes) -> None:
        await asyncio.to_thread(Path(path).write_bytes, content)

    async def download(self, path: str, most: int) -> bytes:
        try:
            with await asyncio.to_thread(Path(path).open, "rb") as file:
                return file.read(most)
        except OSError as error:
            raise ContainerError(str(error)) from None

    async def remove(self) -> None:
        self.removed = True


@asynccontextmanager
async def started(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Container]:
    """A container of a kind; skips where there is none."""
    if kind == "here":
        monkeypatch.setattr(remote, "HOME", str(tmp_path / "home"))
        monkeypatch.setattr(remote, "ARCHIVE", str(tmp_path / "home.tar"))
        yield await made(HereMachine(), LIMITS)
        return
    limits = LIMITS
    if kind != "local":
        if not works(kind):
            pytest.skip(f"{kind} runs no containers here")
        limits = ContainerLimits(kind=kind, image=IMAGE, seconds=20.0, copy_mb=2.0, output_characters=2000)  # type: ignore[arg-type]
    containers = containers_of(limits)
    try:
        container = await containers.start()
        yield container
        await container.stop()
    finally:
        await containers.close()
