"""Ranks are killed at every kind of moment: a deterministic run ends with the same losses and weights, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_x.monitor.metrics import read
from tests.cluster import dying
from tests.cluster.cluster import Cluster, cluster
from tests.launching import ONLINE, command_of, finished

from .test_on_ray import JAX, TORCH, TWO, digest

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

HOW = *TWO, "train.deterministic = True", "train.steps = 6", "train.checkpoint_every = 2", dying.BINDING
Undisturbed = Callable[[str], Path]


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def command(backend: str, model: Path, folder: Path) -> list[str]:
    made = command_of(model, folder, ONLINE, backend, *HOW)
    with (folder / "processes_tasks.py").open("a") as tasks:
        tasks.write(dying.LEARNT)
    return made


@pytest.fixture(scope="module")
def undisturbed(ray: Cluster, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The directory of a run that nothing happens to, with each backend."""
    runs: dict[str, Path] = {}

    def run(backend: str) -> Path:
        if backend not in runs:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            finished(command(backend, tiny_model_dir, folder), 1, 1, folder, **ray.environment)
            runs[backend] = folder / "runs" / "run"
        return runs[backend]

    return run


def assert_same(run: Path, expected: Path) -> None:
    assert digest(run) == digest(expected)
    of_steps = [[(row["step"], row.get("loss"), row.get("reward")) for row in read(x)] for x in (run, expected)]
    assert of_steps[0] == of_steps[1]


CASES = [
    *(pytest.param(JAX, moment, marks=pytest.mark.cluster, id=f"jax-{moment}") for moment in dying.MOMENTS),
    *(pytest.param(TORCH, moment, marks=pytest.mark.cluster, id=f"torch-{moment}") for moment in dying.MOMENTS),
]


@pytest.mark.parametrize("backend, moment", CASES)
def test_a_rank_that_is_killed_changes_neither_losses_nor_weights(
    backend: str, moment: str, undisturbed: Undisturbed, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    made = command(backend, tiny_model_dir, folder)
    dying.order(folder, moment)
    finished(made, 1, 1, folder, **ray.environment)
    assert (folder / dying.DIED).exists()
    said = (folder / "out-0").read_text()
    assert re.search(rf"rank {dying.MOMENTS[moment].rank} is gone: .*; the run continues", said), said
    assert_same(folder / "runs" / "run", undisturbed(backend))
