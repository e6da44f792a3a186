"""The script that a user of an NPU runs: that it runs, in a process without JAX, on a CPU. It says nothing of an NPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("areal_x_torch")

from tests.thorough import thorough

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "npu.py"
SMALL = ["--model", "tiny", "--tokens", "256", "--row-length", "128", "--megabytes", "3", "--rounds", "1"]


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *SMALL, *arguments], capture_output=True, text=True)


@thorough  # four processes that import transformers: 20 s
def test_it_measures_all_three_parts_and_refuses_another_device():
    refused = run()
    assert refused.returncode == 1
    assert "torch finds cpu, not npu: install torch-npu" in refused.stderr
    found = run("--device", "cpu")
    assert found.returncode == 0, found.stderr
    seconds = json.loads(found.stdout.splitlines()[-1])
    assert seconds.pop("device") == "cpu"
    assert list(seconds) == [
        "attention, sdpa",
        "attention in a window of 256, sdpa",
        "a step, sdpa",
        "transfer, a broadcast",
        "transfer, a file",
    ]
    assert all(0 < x < 100 for x in seconds.values())
