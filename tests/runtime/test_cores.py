"""The setting of OpenMP before torch is imported, and the number of threads of each step."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from areal_x.runtime import cores

EXPERIMENT = """
import os, sys
from areal_x.errors import UserError
from areal_x.experiment import Experiment
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.trainer import ModelConfig, TrainerConfig
from areal_x.workflows.single_turn import SingleTurn
trainer = TrainerConfig(ModelConfig("nowhere"))
experiment = Experiment(
    dataset=[1], workflow=SingleTurn(reward=len), engine="vllm", backend="torch", runs=sys.argv[1], trainer=trainer, SETTINGS
)
assert os.environ.get("GOMP_SPINCOUNT") == (sys.argv[2] or None)  # neither an import nor a setting writes the environment
try:
    experiment.open()
except UserError:  # there is no such model
    pass
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def said(settings, folder, **variables):
    environment = {name: x for name, x in os.environ.items() if name not in (cores.VARIABLE, "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", EXPERIMENT.replace("SETTINGS", settings), str(folder), variables.get(cores.VARIABLE, "")]
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
def test_a_trainer_spins_for_less_long_beside_servers_on_its_machine(settings, variables, spins, tmp_path):
    assert said(settings, tmp_path, **variables) == spins


def counts(generating, waited, cost, steps=8, most=4):
    """The thread counts of a trainer whose seconds per token depend on the count."""
    trainer, taken = SimpleNamespace(threads=most), []
    with cores.Threads(trainer, generating) as threads:
        for _ in range(steps):
            taken.append(threads.before(waited))
            assert trainer.threads == taken[-1]
            threads.after(cost[taken[-1]] * 100, tokens=100)
    assert trainer.threads == most
    return taken


def test_a_run_that_waits_for_generation_leaves_it_its_threads():
    assert counts(generating=1, waited=0.06, cost={3: 2.0, 4: 1.0}) == [4, 3, 3, 3, 3, 3, 3, 3]  # every run waits at first


@pytest.mark.parametrize(("cost", "better"), [({3: 2.0, 4: 1.0}, 4), ({3: 1.0, 4: 2.0}, 3)])
def test_a_run_that_does_not_wait_keeps_the_quicker_count_and_tries_the_other_now_and_then(cost, better):
    taken = counts(generating=1, waited=0.04, cost=cost, steps=2 * cores.TRIED)
    assert taken[:4] == [4, 3, 4, better]
    assert taken[3 : cores.TRIED - 1] == [better] * (cores.TRIED - 4)
    assert taken[cores.TRIED - 1 : cores.TRIED + 1] == [7 - better, better]
    assert taken[-1] == 7 - better


def test_a_run_that_generates_in_turns_leaves_one_core_where_that_is_quicker_whatever_it_waits():
    assert counts(generating=0, waited=0.6, cost={3: 1.0, 4: 2.0}) == [4, 3, 4, 3, 3, 3, 3, 3]
    assert counts(generating=0, waited=0.6, cost={3: 2.0, 4: 1.0}) == [4, 3, 4, 4, 4, 4, 4, 4]


def test_a_step_that_suddenly_takes_longer_has_the_other_count_tried_at_once():
    taken, trainer = [], SimpleNamespace(threads=4)
    with cores.Threads(trainer, 0) as threads:
        for step in range(12):
            busy = step >= 6  # another program has a core
            taken.append(threads.before(0.0))
            threads.after({4: 7.0 if busy else 1.0, 3: 1.6 if busy else 1.5}[taken[-1]], tokens=1)
    assert taken == [4, 3, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3]


def test_what_the_first_step_took_says_nothing():
    taken, trainer = [], SimpleNamespace(threads=2)
    with cores.Threads(trainer, 1) as threads:
        for seconds in (9.0, 3.0, 1.0, 1.0):
            taken.append(threads.before(0.0))
            threads.after(seconds, tokens=1)
    assert taken == [2, 1, 2, 2]


@pytest.mark.parametrize("generating", [3, 9])
def test_a_trainer_keeps_a_thread(generating):
    assert min(counts(generating, waited=1.0, cost=dict.fromkeys(range(5), 1.0))) == 1


@pytest.mark.parametrize(
    ("trainer", "generating"),
    [
        (SimpleNamespace(threads=None), 1),
        (SimpleNamespace(threads=4), None),
        (SimpleNamespace(threads=1), 1),
    ],
)
def test_a_trainer_without_threads_to_choose_from_is_left_alone(trainer, generating):
    before = vars(trainer).copy()
    with cores.Threads(trainer, generating) as threads:
        assert threads.before(1.0) is None
        threads.after(1.0, tokens=1)
    assert vars(trainer) == before
