"""Starts one command in several processes that find each other."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import QUICK, environment_with


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], processes: int, devices: int, folder: Path, **more: str
) -> Iterator[list[subprocess.Popen]]:
    """The same command in several processes, whose outputs go to files out-0, err-0 …; those left at the end are killed."""
    environment = environment_with(devices, PYTHONFAULTHANDLER="1", **QUICK, **more)
    if processes > 1:
        environment |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        made = []
        for rank in range(processes):
            out, err = (stack.enter_context((folder / f"{name}-{rank}").open("w")) for name in ("out", "err"))
            process = subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=out, stderr=err, cwd=folder)
            made.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield made


def finished(command: Sequence[str], processes: int, devices: int, folder: Path, **more: str) -> None:
    with started(command, processes, devices, folder, **more) as made:
        codes = [process.wait(timeout=250) for process in made]
    assert not any(codes), f"{codes}\n" + "\n".join((folder / f"err-{rank}").read_text() for rank in range(processes))
