"""What is said to OpenMP before torch is there."""

import os
import subprocess
import sys

import pytest

from areal_x import cores

EXPERIMENT = """
import os
from areal_x.experiment import Experiment
from areal_x.rollout.vllm.config import VLLMConfig
from areal_x.rollout.workflows import SingleTurn
Experiment(dataset=[1], workflow=SingleTurn(reward=len), engine="vllm", backend="torch", SETTINGS)
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def said(settings, **variables):
    environment = {name: x for name, x in os.environ.items() if name not in (cores.VARIABLE, "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", EXPERIMENT.replace("SETTINGS", settings)]
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("settings", "variables", "spins"),
    [
        ("max_staleness=2", {}, cores.SHARING),
        ("max_staleness=0", {}, cores.BRIDGING),  # they take turns
        ("max_staleness=2, vllm=VLLMConfig(urls=('http://127.0.0.1:1',))", {}, cores.BRIDGING),
        ("max_staleness=2", {"GOMP_SPINCOUNT": "77"}, "77"),
        ("max_staleness=2", {"OMP_WAIT_POLICY": "passive"}, "None"),
    ],
)
def test_a_trainer_spins_for_less_long_beside_servers_on_its_machine(settings, variables, spins):
    assert said(settings, **variables) == spins
