"""A run may be moved from one backend to the other: nothing that it learns shows where it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_x import train
from areal_x.monitor.metrics import read
from areal_x.types import Batch
from tests.backend_moves import Course, across, deviations, learn, recorded_batches, trainer
from tests.thorough import further

pytest.importorskip("jax")
pytest.importorskip("torch")

UPDATES = 12  # benchmarks/moving.py takes 40
MOVES = [("jax", "torch"), ("torch", "jax")]


@pytest.fixture(scope="module")
def batches(tiny_model_dir: Path) -> list[Batch]:
    return recorded_batches(UPDATES, trainer("torch", tiny_model_dir, across(UPDATES)), mean=1.0)


@pytest.fixture(scope="module")
def unbroken(tiny_model_dir: Path, batches: list[Batch]) -> Course:
    return learn(["jax"], tiny_model_dir, batches, optimizer=across(UPDATES))


@pytest.mark.parametrize("backends", [("torch",), MOVES[0], *further((MOVES[1],))], ids=" then ".join)
def test_each_loss_and_the_last_weights_are_those_of_a_run_that_stays(tiny_model_dir, batches, unbroken, backends):
    loss, largest, norm = deviations(learn(backends, tiny_model_dir, batches, optimizer=across(UPDATES)), unbroken)
    assert loss < 1e-5
    assert largest < 1e-4
    assert norm < 1e-5


# ---- the command

TASKS = """
import gin
from tests.experiments import TASKS

@gin.configurable(module="moving_test")
def counts_digits(task, text):
    return sum(c.isdigit() for c in text) / 8

@gin.configurable(module="moving_test")
def ten_tasks():
    return TASKS
"""

# Ten tasks, two a step: the second epoch, with an order of its own, begins after the move.
RUN = """
import moving_test_tasks
train.dataset = @ten_tasks()
train.workflow = @single_turn()
single_turn.reward = @counts_digits
single_turn.reward_workers = 1
sampling.max_tokens = 8
model.path = "MODEL"
optimizer.learning_rate = 1e-3
optimizer.warmup_steps = 5
trainer.precision = "fp32"
train.steps = 7
train.groups_per_step = 2
train.group_size = 4
train.max_staleness = 0
train.row_length = 32
embedded.slots = 8
"""


@pytest.fixture
def place(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("moving_test_tasks.py").write_text(TASKS)
    Path("run.gin").write_text(RUN.replace("MODEL", str(tiny_model_dir)))
    return tmp_path


@pytest.mark.parametrize("first, second", [MOVES[1], *further(MOVES[0])])
def test_the_command_goes_on_with_a_run_of_the_other_backend(place, first, second):
    def run(name: str, backend: str, *more: str) -> list[dict[str, float]]:
        bindings = f"train.name = '{name}'", f"train.backend = '{backend}'"
        assert train.main(["run.gin", *(part for binding in bindings for part in ("-b", binding)), *more]) == 0
        return [row for row in read(place / "runs" / name) if row["step"]]

    run("moved", first, "-b", "train.steps = 4")
    moved, stayed = run("moved", second, "--resume"), run("stayed", first)
    assert [row["step"] for row in moved] == list(range(1, 8))
    for key in ("reward", "response_length", "trained_tokens", "learning_rate"):  # the same tasks, drawn the same way
        assert [row[key] for row in moved] == [row[key] for row in stayed], key
    assert all(row["grad_norm"] > 0 for row in moved)
    np.testing.assert_allclose([row["grad_norm"] for row in moved], [row["grad_norm"] for row in stayed], rtol=1e-3)
