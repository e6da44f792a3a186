"""Servers that are killed with SIGKILL at random moments of a run of the unmodified client: it ends with the same
weights. KILLS is their number (2; 50 took 9 minutes), TINKER_PYTHON the client's Python (test_client.py).

KILLS=50 TINKER_PYTHON=… python -m pytest -m thorough tests/tinker/test_kills.py"""

from __future__ import annotations

import json
import os
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
STEPS = 8 + 12 * KILLS
PAUSE_SECONDS = 1.0  # at most, from a step of the client's to the kill after it

pytestmark = [needs_client, pytest.mark.thorough, pytest.mark.timeout(300 + 60 * KILLS)]


class Server:
    """`areal-x tinker` in a directory: each start goes on with the address and the key of the one before."""

    def __init__(self, place: Path, backend: str) -> None:
        self.place = place
        self.command = [sys.executable, "-m", "areal_x", "tinker", "--model", "m", "--backend", backend]
        self.command += ["--context", "64", "--slots", "2"]
        self.environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled")}
        self.url = self.start()

    def start(self) -> str:
        self.log = (self.place / "server.log").open("a")
        streams = {"stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        environment = {**self.environment, "TINKER_API_KEY": KEY}
        self.process: Any = subprocess.Popen(self.command, cwd=self.place, env=environment, **streams)
        line: str = self.process.stdout.readline().strip()
        assert line.startswith("export TINKER_BASE_URL="), (self.place / "server.log").read_text()[-3000:]
        return line.removeprefix("export TINKER_BASE_URL=")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


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
        for line in client.stdout:
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    random = np.random.default_rng(kills)
    done = 0
    try:
        while client.poll() is None:
            seen = len(lines)
            while client.poll() is None and (done == kills or len(lines) == seen):
                time.sleep(0.01)
            if client.poll() is None:
                time.sleep(random.uniform(0, PAUSE_SECONDS))  # the moment of the kill
                server.kill()
                done += 1
                assert server.start() == server.url
        reader.join()
        assert client.returncode == 0, errors.read_text()[-3000:]
    finally:
        server.kill()
        client.kill()
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
    assert found == expected  # every loss and gradient norm
    assert weights.keys() == others.keys()
    assert all((others[name] == x).all() for name, x in weights.items())  # bit for bit
