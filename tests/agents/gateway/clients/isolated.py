"""Real clients in environments of their own: variables and a home of their own, and no network but the gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest

from tests.agents.gateway.clients.relay import joined

RELAY = Path(__file__).with_name("relay.py")
SECONDS = 120.0  # for a client, on a busy machine; most take 1 to 5


@cache
def namespace() -> list[str]:
    """Returns the command that runs another one without a network. Skips the test where that is not allowed."""
    command = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    return command


@contextmanager
def bridge(address: str, path: Path) -> Iterator[None]:
    """Connects a Unix socket, which every namespace reaches, to the gateway."""
    host, port = urlsplit(address).hostname, urlsplit(address).port
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await joined((reader, writer), there)

    server = loop.run_until_complete(asyncio.start_unix_server(connected, path))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass
class Running:
    """A client that was started."""

    process: subprocess.Popen[str]
    stopped: bool = field(default=False)

    def ended(self) -> str:
        """Waits, and returns what it printed. Raises: AssertionError with its complaints, unless it was interrupted."""
        try:
            printed, complained = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            printed, complained = self.process.communicate()
            raise AssertionError(f"the client did not end:\n{printed[-3000:]}\n{complained[-3000:]}") from None
        assert self.stopped or self.process.returncode == 0, (self.process.returncode, printed[-3000:], complained[-3000:])
        return printed

    def interrupt(self) -> None:
        """Stops it as Ctrl-C at a terminal does, and kills it if that is not enough."""
        self.stopped = True
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], home: Path, url: str, directory: Path | None = None
) -> Iterator[Running]:
    """Starts a client. environment: all of its variables, beside HOME, PATH and those of the language. url: of its session,
    whose address is the only one that it can reach."""
    variables = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb", **environment}
    with TemporaryDirectory() as folder, bridge(url, path := Path(folder) / "gateway"):  # a socket's path is short
        words = [*namespace(), sys.executable, "-I", str(RELAY), str(urlsplit(url).port), str(path), *command]
        process = subprocess.Popen(
            words,
            env=variables,
            cwd=directory or home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running = Running(process)
        try:
            yield running
        finally:
            running.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
