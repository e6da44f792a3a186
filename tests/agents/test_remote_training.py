"""A run whose agents are on another machine, from its file to its metrics."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys

import pytest

from areal_x.runtime.credentials import GATEWAY_KEY
from tests.agents.certificates import certificate, needs_openssl, other_machine
from tests.conftest import environment_with
from tests.examples.running import ROOT, trained

AGENT = "examples.agents.adding.with_openai"


@pytest.mark.thorough
@needs_openssl
def test_an_unmodified_agent_on_another_machine_trains_a_model_through_tls(tmp_path, monkeypatch):
    """With a key that the user chose, a worker that was there before the run, and one network."""
    pytest.importorskip("openai")
    monkeypatch.setenv(GATEWAY_KEY, secrets.token_hex(32))
    with other_machine() as machine:
        files = certificate(tmp_path, machine.here)
        with socket.create_server((machine.here, 0)) as free:
            port = free.getsockname()[1]
        url = f"https://{machine.here}:{port}"
        command = [sys.executable, "-m", "areal_x", "agents", "work", url, "--certificate", files.file, "--agent", AGENT]
        with (tmp_path / "worker.log").open("wb") as log:
            working = subprocess.Popen(machine.inside(*command), cwd=ROOT, env=environment_with(1), stdout=log, stderr=log)
        try:
            metrics = trained(
                "agents/workers.gin",
                tmp_path,
                monkeypatch,
                arithmetic__warm_start__steps=2,
                remote_agent__address_file=str(tmp_path / "gateway.json"),
                gateway__host=machine.here,
                gateway__port=port,
                gateway__certificate=files.file,
                gateway__certificate_key=files.key,
                gateway__networks=(f"{machine.addresses[0]}/32",),
                gateway__key_variable=GATEWAY_KEY,
            )
            assert working.wait(60) == 0
        finally:
            working.kill()
            working.wait()
    steps = [line for line in metrics if "loss" in line]
    assert len(steps) == 2
    said = (tmp_path / "worker.log").read_text()
    answered = int(said.rpartition("ended; ")[2].split()[0])
    assert answered >= 8, said  # two steps of two groups of two
