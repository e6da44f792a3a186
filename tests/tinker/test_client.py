"""The unmodified `tinker` client, from an environment of its own: TINKER_PYTHON is that environment's Python
(pip install tinker torch). Without it, what the server answers is tested by plain HTTP (test_server.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.testing.models import write_model

PROGRAM = Path(__file__).parent / "client_program.py"
PYTHON = os.environ.get("TINKER_PYTHON")
KEY = "tml-a-key-for-the-tests"
SERVED = pytest.param("torch", "vllm", marks=[pytest.mark.server, pytest.mark.xdist_group("vllm")])
BY = [("torch", "embedded"), ("jax", "embedded"), SERVED]

needs_client = pytest.mark.skipif(PYTHON is None, reason="TINKER_PYTHON names no Python with the tinker client")


@contextmanager
def serving(place: Path, model: str, *options: str) -> Iterator[dict[str, str]]:
    """Runs `areal-x tinker` in a directory and gives the environment of its clients."""
    command = [sys.executable, "-m", "areal_x", "tinker", "--model", model, *options]
    environment = {**os.environ, "TINKER_API_KEY": KEY}
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert lines[1] == f"export TINKER_API_KEY={KEY}", lines
        written = place / "runs" / "tinker" / "tinker.json"
        url = lines[0].removeprefix("export TINKER_BASE_URL=")
        assert json.loads(written.read_text()) == {"url": url, "key": KEY}
        assert written.stat().st_mode & 0o777 == 0o600
        try:
            yield {**environment, "TINKER_BASE_URL": url}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, 130)
    assert not [*(place / "runs" / "tinker").rglob(".*.part")]  # nothing is half written


@needs_client
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "engine"), BY)
def test_a_program_of_the_client_trains_samples_saves_and_lists(tmp_path: Path, backend: str, engine: str) -> None:
    check(run(tmp_path, backend, PROGRAM, "--engine", engine))


def run(place: Path, backend: str, program: Path, *options: str) -> dict[str, Any]:
    """Runs a program against a server of a tiny model and returns what it prints."""
    pytest.importorskip(f"areal_x_{backend}")
    write_model(place / "m", num_hidden_layers=1)
    assert PYTHON is not None
    with serving(place, "m", "--backend", backend, "--context", "128", "--slots", "4", *options) as environment:
        clean = {name: x for name, x in environment.items() if name != "PYTHONPATH"}
        ran = subprocess.run([PYTHON, program, "m"], cwd=place, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    line = next(line for line in ran.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@needs_client
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "engine"), BY)
def test_clients_of_several_adapters_at_once_get_what_each_alone_gets(tmp_path: Path, backend: str, engine: str) -> None:
    found = run(tmp_path, backend, PROGRAM.with_name("adapters_program.py"), "--engine", engine)
    for one, own in zip(found["at_once"], found["alone"], strict=True):
        np.testing.assert_allclose(one["losses"], own["losses"], rtol=1e-4, atol=1e-4)
        assert one["losses"][-2] < one["losses"][0]
        assert one["tokens"] == own["tokens"]
        np.testing.assert_allclose(one["logprobs"], own["logprobs"], atol=1e-4)


def check(found: dict[str, Any]) -> None:
    assert (found["models"], found["info"]) == (["m"], [True, 4])
    assert found["losses"][0] > found["losses"][1] > found["losses"][2]
    assert found["step"]["skipped"] == 0
    # at a ratio of 1 the advantages -1 … 1 cancel out
    assert [found[x] for x in ("importance_sampling", "ppo", "gspo")] == pytest.approx([0, 0, 0], abs=1e-5)
    assert found["stable_reinforce"] == pytest.approx(found["by_hand"], rel=1e-5)
    assert found["custom"]["loss:sum"] == pytest.approx(found["custom"]["surrogate_loss:sum"], rel=1e-5)
    assert found["custom"]["mine"] == 1
    assert found["restored"][0] == pytest.approx(found["restored"][1], rel=1e-6)
    assert found["restored"][0] < found["losses"][2]
    assert found["samples"] == found["named"] == found["copy"]
    assert found["samples"][0] != found["samples"][1]
    assert found["stop"] == ["length", "length"]
    assert found["prompt_logprobs"][0] is None
    np.testing.assert_allclose(found["prompt_logprobs"][1:], found["forward_logprobs"], atol=1e-4)
    # the trainer's log-probabilities of the sampled tokens are those of the sampler
    np.testing.assert_allclose(found["scored"][10:], found["sample_logprobs"][0], atol=1e-4)
    assert found["top"][0] is None
    assert all(row[0][1] >= row[1][1] for row in found["top"][1:] + found["top_of_samples"])
    assert all(row[0][1] >= x - 1e-4 for row, x in zip(found["top"][1:], found["prompt_logprobs"][1:], strict=True))
    assert np.count_nonzero(found["named_logprobs"]) == 2
    assert not np.allclose(found["plain"][1:], found["prompt_logprobs"][1:], atol=0.1)
    assert found["runs"] == 2
    assert found["checkpoints"] == ["sampler_weights/kept", "weights/first"]
    assert found["left"] == ["weights/first"]
    assert "no setting 'beta'" in found["refused"]


@pytest.mark.parametrize(
    "options, why",
    [
        ([], "give either FILE.gin or --model"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--model", "m", "--keys", "none"], "cannot be read"),
        (["--model", "m", "-b", "x = 1"], "-b binds settings"),
        (["--model", "m", "--engine", "vllm", "--max-rank", "0"], "--max-rank = 0"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    pytest.importorskip("starlette")
    from areal_x.tinker import main

    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(options)
    except SystemExit as ended:  # argparse's
        status = ended.code
    assert status in (1, 2)
    assert why in capsys.readouterr().err
