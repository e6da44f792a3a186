"""What is said to OpenMP before torch is there, and how many threads a step gets."""

import os
import subprocess
import sys
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("generating", "waited", "last", "count"),
    [
        (1, 3.0, None, 4),  # every run waits for its first groups
        (1, 0.4, 10.0, 4),
        (1, 0.6, 10.0, 3),
        (3, 9.0, 10.0, 1),
        (9, 9.0, 10.0, 1),
        (0, 9.0, 10.0, 4),  # generation that waits meanwhile, or has cores of its own
    ],
)
def test_a_step_that_waited_for_generation_leaves_it_its_threads(generating, waited, last, count):
    trainer = SimpleNamespace(threads=4)
    with cores.Threads(trainer, generating) as threads:
        assert threads(waited, last) == trainer.threads == count
    assert trainer.threads == 4


@pytest.mark.parametrize("trainer", [SimpleNamespace(), SimpleNamespace(threads=None)])
def test_a_trainer_that_has_no_say_in_its_threads_is_left_alone(trainer):
    before = vars(trainer).copy()
    with cores.Threads(trainer, 1) as threads:
        assert threads(9.0, 10.0) is None
    assert vars(trainer) == before
