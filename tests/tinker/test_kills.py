"""Servers that are killed with SIGKILL at random moments of a run of the unmodified client: it ends with the same
weights. KILLS is their number (2), TINKER_PYTHON the client's Python (test_client.py).

KILLS=50 TINKER_PYTHON=… python -m pytest -m thorough tests/tinker/test_kills.py"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.hf import adapters
from areal_x.testing.models import write_model
from tests.tinker.test_client import KEY, PYTHON, needs_client

PROGRAM = Path(__file__).parent / "long_program.py"
KILLS = int(os.environ.get("KILLS", "2"))
SEED = int(os.environ.get("KILLS_SEED", "0"))  # of their moments
STEPS = 8 + 6 * KILLS
PAUSE_SECONDS = 0.3  # at most, from a step of the client's, or a start of the server, to the kill after it
AT_START = 0.3  # of the kills, while the server still repeats what was lost

pytestmark = [needs_client, pytest.mark.thorough, pytest.mark.timeout(300 + 60 * KILLS)]


class Server:
    """`areal-x tinker` in a directory: each start goes on with the address and the key of the one before."""

    def __init__(self, place: Path, backend: str) -> None:
        self.log = place / "server.log"
        arguments = ["--model", "m", "--backend", backend, "--context", "64", "--slots", "2"]
        self.arguments = json.dumps(arguments)
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"), "TINKER_API_KEY": KEY}
        command = [sys.executable, str(Path(__file__).parent / "forking.py"), backend]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.log.open("w") as log:
            self.parent: Any = subprocess.Popen(command, cwd=place, env=environment, stderr=log, **pipes)
        self.url = self.start()

    def start(self) -> str:
        """Returns its address."""
        self.parent.stdin.write(self.arguments + "\n")
        self.parent.stdin.flush()
        self.process = int(self.line("PID "))
        return self.line("export TINKER_BASE_URL=")

    def line(self, beginning: str) -> str:
        """Returns the rest of the next line that begins so."""
        for line in self.parent.stdout:
            if line.startswith(beginning):
                return str(line).removeprefix(beginning).strip()
            assert not line.startswith("DEAD"), self.log.read_text()[-3000:]
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        self.line("DEAD")

    def close(self) -> None:
        self.kill()
        self.parent.stdin.close()
        self.parent.wait(60)
        self.parent.stdout.close()


def run(place: Path, backend: str, kills: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns what the client saw, and the weights that it saved last."""
    place.mkdir()
    write_model(place / "m", num_hidden_layers=1)
    server = Server(place, backend)
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": server.url}
    lines: list[str] = []
    assert PYTHON is not None
    command = [PYTHON, str(PROGRAM), "m", str(STEPS)]
    errors = place / "client.log"
    with errors.open("w") as log:
        client = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)

    def read() -> None:
        assert client.stdout is not None
        with client.stdout as out:
            for line in out:
                lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    random = np.random.default_rng(SEED)
    done = 0
    try:
        while client.poll() is None:
            seen, waits = len(lines), done == 0 or random.random() > AT_START
            while client.poll() is None and (done == kills or (waits and len(lines) == seen)):
                time.sleep(0.01)
            if client.poll() is None:
                time.sleep(random.uniform(0, PAUSE_SECONDS))  # the moment of the kill
                server.kill()
                done += 1
                assert server.start() == server.url
        reader.join()
        assert client.returncode == 0, errors.read_text()[-3000:]
    finally:
        client.kill()
        server.close()
    assert done == kills, f"the client ended after {done} kills: give it more steps"
    found = json.loads(lines[-1].removeprefix("RESULT "))
    run_id, _, name = found.pop("path").removeprefix("tinker://").partition("/")
    (state,) = (place / "runs" / "tinker" / "checkpoints").glob(f"*/{run_id}/{name}/state")
    return found, dict(adapters.read(state))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_client_of_a_server_that_is_killed_ends_with_the_same_weights(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    expected, weights = run(tmp_path / "whole", backend, 0)
    found, others = run(tmp_path / "killed", backend, KILLS)
    pairs = enumerate(zip(expected["seen"], found["seen"], strict=True))
    assert [(number, x, y) for number, (x, y) in pairs if x != y] == []  # every loss and gradient norm
    assert weights.keys() == others.keys()
    assert all((others[name] == x).all() for name, x in weights.items())  # bit for bit
