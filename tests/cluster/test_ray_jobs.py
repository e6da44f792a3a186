"""Commands that `ray job submit` runs: the dashboard of a real head takes them, which needs `pip install 'ray[default]'`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from areal_x.monitor.metrics import read
from areal_x.run import checkpoint
from tests.cluster.cluster import ENVIRONMENT, TOKEN, ended
from tests.conftest import environment_with
from tests.launching import ONE_RANK, WRITTEN, command_of, free_port

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_spec("aiohttp_cors"), reason="needs pip install 'ray[default]'"),
]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SECONDS = 300


@dataclass
class Head:
    """A head whose dashboard takes jobs."""

    address: str
    environment: dict[str, str]

    def job(self, *words: str, check: bool = True) -> str:
        """Returns what a command about jobs prints."""
        command = [*RAY, "job", words[0], "--address", self.address, *words[1:]]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, name: str, folder: Path, command: list[str], *options: str, check: bool = True) -> str:
        of_job = ["--submission-id", name, "--working-dir", str(folder), *options]
        return self.job("submit", *of_job, "--", *command, check=check)

    def ends(self, name: str, status: str) -> str:
        """Waits until a job has ended so, and returns what it has printed."""
        wait_for(lambda: any(word in self.job("status", name) for word in ("succeeded", "failed", "was stopped")), name)
        said = self.job("logs", name)
        assert status in self.job("status", name), said
        return said


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    dashboard = free_port()
    environment = environment_with(1, **ENVIRONMENT, RAY_JOB_STOP_WAIT_TIME_S="60")
    command = [*RAY, "start", "--head", "--block", "--num-cpus", "2", "--node-ip-address", "127.0.0.1", "--port", "0"]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard), "--object-store-memory", str(100 << 20)]
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process, ended(process):
        made = Head(f"http://127.0.0.1:{dashboard}", environment)
        wait_for(lambda: "No jobs" in (said := made.job("list", check=False)) or "[]" in said, log.read_text())
        yield made


def test_a_job_without_the_token_is_refused(head: Head, tmp_path: Path) -> None:
    for stranger in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": TOKEN + "x"}):
        asking = Head(head.address, head.environment | stranger)
        said = asking.submit("stranger", tmp_path, [sys.executable, "-c", "print('in the cluster')"], check=False)
        assert "ray.exceptions.AuthenticationError: Authentication" in said, said
        assert "in the cluster" not in said


def test_a_job_stops_in_order_and_the_next_one_goes_on(head: Head, tiny_model_dir: Path, tmp_path: Path) -> None:
    folder, runs = tmp_path / "submitted", tmp_path / "runs"
    command = [*command_of(tiny_model_dir, folder, WRITTEN, *ONE_RANK, "mesh.processes = 1"), "--resume=auto"]
    relative = head.submit("relative", folder, command, check=False)
    assert "train.runs = 'runs' cannot work: it must be an absolute path on all nodes, because `ray job submit" in relative
    assert not runs.exists()

    command += ["-b", f"train.runs = '{runs}'"]
    head.submit("first", folder, command, "--no-wait")
    run = runs / "run"
    wait_for(lambda: checkpoint.steps(run), "a checkpoint")
    head.job("stop", "first")
    said = head.ends("first", "was stopped")
    assert f"stopped: the run is in {run}; continue from step " in said, said
    assert "Traceback" not in said

    last = checkpoint.steps(run)[-1] + 1
    head.submit("second", folder, [*command, "-b", f"train.steps = {last}"])
    head.ends("second", "succeeded")
    assert [row["step"] for row in read(run)] == list(range(last + 1))
    assert not [process for process in psutil.process_iter() if str(folder) in " ".join(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline() if process.pid != os.getpid() else []
    return []
