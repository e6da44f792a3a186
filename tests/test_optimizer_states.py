"""Every optimizer, form of checkpoint and backend, resumed on either backend: the next step is the undisturbed run's, or the
resume is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("areal_x_jax")

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig
from tests.backend_moves import LOSS, recorded_batches, trainer
from tests.models import write_random

BACKENDS = ("jax", "torch")
FORMS = ("portable", "sharded")
OPTIMIZERS = ("adamw", "adafactor", "muon")
RATE = {"learning_rate": 1e-3, "warmup_steps": 3, "schedule": "cosine", "schedule_steps": 10, "weight_decay": 0.1}


@dataclass(frozen=True)
class Course:
    """A trainer of three steps; the folders of what it was after two, by form; the weights after the third."""

    trainer: Trainer
    saved: dict[str, Path]
    weights: dict[str, np.ndarray]


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, **RATE | changes)


def weights_of(learner: Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in learner.weights()}


def save(learner: Any, form: str, directory: Path) -> Path:
    object.__setattr__(learner.config, "checkpoint", form)
    wait = learner.save_in_background(directory)
    if wait is not None:
        wait()
    return directory


@pytest.fixture(scope="module")
def batches(tiny_model_dir):
    return recorded_batches(3, trainer("torch", tiny_model_dir, config_of("adamw")), mean=1.0)


@pytest.fixture(scope="module")
def courses(tiny_model_dir, tmp_path_factory, batches):
    made: dict[tuple[str, str], Course] = {}

    def course(backend: str, optimizer: str) -> Course:
        if (backend, optimizer) not in made:
            learner = trainer(backend, tiny_model_dir, config_of(optimizer))
            for batch in batches[:2]:
                learner.update(batch, LOSS)
            saved = {form: save(learner, form, tmp_path_factory.mktemp(f"{backend}-{optimizer}-{form}")) for form in FORMS}
            learner.update(batches[2], LOSS)
            made[backend, optimizer] = Course(learner, saved, weights_of(learner))
        return made[backend, optimizer]

    return course


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("writer", BACKENDS)
@pytest.mark.parametrize("reader", BACKENDS)
def test_the_next_step_after_a_resume_is_that_of_the_run_that_was_not_disturbed(
    courses, batches, optimizer, form, writer, reader
):
    written, resumed = courses(writer, optimizer), courses(reader, optimizer).trainer
    if form == "sharded" and reader != writer:
        with pytest.raises(UserError, match=f"a sharded checkpoint of the {writer} backend"):
            resumed.restore(written.saved[form])
        return
    resumed.restore(written.saved[form])  # in place of what it was after three steps
    assert resumed.version == 2
    resumed.update(batches[2], LOSS)
    found = weights_of(resumed)
    assert found.keys() == written.weights.keys()
    for name, expected in written.weights.items():
        if reader == writer:
            np.testing.assert_array_equal(found[name], expected)
        else:
            np.testing.assert_allclose(found[name], expected, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_are_under_the_names_of_tensors(courses, tiny_model_dir, backend):
    names = {name: shape for name, shape in model_dir.shapes(tiny_model_dir).items() if name != "lm_head.weight"}
    for optimizer in ("adafactor", "muon"):
        directory = courses(backend, optimizer).saved["portable"]
        assert "backend" not in model_dir.read_trainer_state(directory)
        moments = {name: x.shape for name, x in model_dir.read_moments(directory)}
        for name, shape in names.items():
            if optimizer == "muon":
                own = ["trace"] if ".layers." in name and len(shape) == 2 else ["exp_avg", "exp_avg_sq"]
                assert [moments[f"{which}.{name}"] for which in own] == [shape] * len(own)
            else:
                rows, columns = shape if len(shape) == 2 else (*shape, 1)
                assert (moments[f"row.{name}"], moments[f"column.{name}"]) == ((rows, 1), (1, columns))


def test_a_sharded_checkpoint_that_does_not_name_its_backend_is_resumed(courses):
    """Earlier releases wrote none."""
    for backend in BACKENDS:
        written = courses(backend, "muon")
        file = written.saved["sharded"] / model_dir.STATE
        state = json.loads(file.read_text())
        assert state.pop("backend") == backend
        file.write_text(json.dumps(state))
        written.trainer.restore(written.saved["sharded"])
        assert written.trainer.version == 2


@pytest.mark.parametrize("writer, reader", [BACKENDS, BACKENDS[::-1]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_of_a_mixture_only_adamws_state_moves(tmp_path, optimizer, writer, reader):
    """torch has its experts' tensors joined, so that Muon's and Adafactor's matrices are others."""
    directory = write_random("qwen3-moe", tmp_path / "model")
    first, same, other = (trainer(backend, directory, config_of(optimizer)) for backend in (writer, writer, reader))
    first.save(tmp_path / "saved")
    same.restore(tmp_path / "saved")
    if optimizer == "adamw":
        other.restore(tmp_path / "saved")
    else:
        with pytest.raises(
            UserError, match=rf"{optimizer} in a form that only the {writer} backend reads.*train\.backend = '{writer}'"
        ):
            other.restore(tmp_path / "saved")


@pytest.mark.parametrize("writer, reader", [BACKENDS, BACKENDS[::-1]])
def test_the_state_of_adapters_moves_too(tiny_model_dir, tmp_path, writer, reader):
    first, other = (
        trainer(backend, tiny_model_dir, config_of("muon"), lora=LoRAConfig(rank=4)) for backend in (writer, reader)
    )
    first.save(tmp_path / "first")
    other.restore(tmp_path / "first")
    other.save(tmp_path / "other")
    one, two = (dict(model_dir.read_moments(tmp_path / name)) for name in ("first", "other"))
    assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in two.items()}


@pytest.mark.parametrize("writer, reader", [BACKENDS, BACKENDS[::-1]])
def test_the_state_of_another_optimizer_is_refused_on_either_backend(courses, tiny_model_dir, writer, reader):
    with pytest.raises(UserError, match=r"set optimizer\.name = 'muon', or"):
        courses(reader, "adamw").trainer.restore(courses(writer, "muon").saved["portable"])
