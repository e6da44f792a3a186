"""Real vLLM servers pull weights from a gang on Ray, on CPUs (tests/cluster/host_memory says what stands in for GPUs)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.pulls import ANSWER
from tests.cluster.watched import servers_left
from tests.conftest import environment_with

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(900), pytest.mark.cluster, pytest.mark.server]

HOST_MEMORY = Path(__file__).parent / "host_memory"
SAME, OTHER = 2e-4, 0.02  # nats per token: of the same weights, and of other ones


@dataclass
class Run:
    """The process of tests.cluster.pulls."""

    process: subprocess.Popen[str]
    folder: Path

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(self.errors()[-8000:])

    def errors(self) -> str:
        return (self.folder / "driver.err").read_text()


@contextmanager
def run_of(folder: Path, model: Path, processes: int, servers: int) -> Iterator[Run]:
    words = [sys.executable, "-m", "tests.cluster.pulls", folder, model, processes, servers]
    environment = environment_with(1)
    environment.pop("RAY_ADDRESS", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(HOST_MEMORY), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with (
        (folder / "driver.err").open("w") as errors,
        subprocess.Popen(
            list(map(str, words)), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            run = Run(process, folder)
            assert run.answer() == "started"
            yield run
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=120) == 0, run.errors()[-8000:]
        finally:
            process.kill()
    assert not servers_left(model)


def check_scores(run: Run, least: int) -> None:
    """Each server that serves has the trainer's newest weights, and not those before. least: how many serve."""
    run.ask(f"serve {least}")
    scores = run.ask("scores")
    assert len(scores) >= least
    for now, before in scores.values():
        assert now < SAME
        assert before > OTHER


def test_a_server_computes_with_each_version_of_the_trainers_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("areal_x_torch")
    with run_of(tmp_path, tiny_model_dir, processes=2, servers=1) as run:
        for version in (1, 2, 3):
            assert run.ask("publish") == version
            check_scores(run, 1)


def test_a_server_that_is_lost_pulls_the_next_version_once_it_is_back(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("areal_x_torch")
    with run_of(tmp_path, tiny_model_dir, processes=2, servers=2) as run:
        assert run.ask("publish") == 1
        check_scores(run, 2)
        run.ask("kill 1")
        assert run.ask("publish") == 2
        check_scores(run, 1)
        run.ask("wait")
        assert run.ask("publish") == 3
        check_scores(run, 2)
