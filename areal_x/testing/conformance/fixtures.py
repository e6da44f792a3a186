"""Fixtures of the suite: the backend under test, models, and a trainer whose steps move nothing."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from areal_x.protocols.backends import GROUP
from areal_x.protocols.trainer import Trainer
from areal_x.testing.conformance.helpers import STILL, make_trainer, write_scorer
from areal_x.testing.models import write_model

__all__ = ["backend", "model_dir", "other_dir", "scorer_dir", "still"]


def installed() -> list[str]:
    """Returns the names of the installed backends."""
    return sorted({entry_point.name for entry_point in entry_points(group=GROUP)})


@pytest.fixture(scope="module", params=installed())
def backend(request: pytest.FixtureRequest) -> str:
    """The backend under test."""
    return str(request.param)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights, and a tied head."""
    return write_model(tmp_path_factory.mktemp("other"), seed=1, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def scorer_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The model with a random `score` in place of its head: a critic or reward model."""
    return write_scorer(tmp_path_factory.mktemp("scorer"), model_dir)


@pytest.fixture(scope="module")
def still(backend: str, model_dir: Path) -> Trainer:
    """A trainer whose steps move nothing, so that many tests can share it."""
    return make_trainer(backend, model_dir, optimizer=STILL)
