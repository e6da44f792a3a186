"""Several processes train one model, each with two devices of a CPU, over gloo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.hf import model_dir
from tests.launching import finished
from tests.thorough import thorough

MESHES = {
    "tensor": {"optimizer": "muon", "fsdp": 2, "tensor": 2},
    "fsdp": {"optimizer": "adamw", "fsdp": 4},
    "stage": {"optimizer": "adamw", "stage": 2, "fsdp": 2},  # of two processes, each is a stage
}


@pytest.fixture(scope="module")
def asked(model_dir_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of one process with four devices, one-two-NAME.json, and of two with two, two-NAME.json."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.jax.processes", str(model_dir_of("even")), str(folder)]
    finished([*command, *(json.dumps({**mesh, "name": f"one-two-{name}"}) for name, mesh in MESHES.items())], 1, 4, folder)
    of_two = (json.dumps({**mesh, "name": f"two-{name}", "processes": 2}) for name, mesh in MESHES.items())
    finished([*command, *of_two], 2, 2, folder)
    return folder


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_of_two_devices_learn_what_one_of_four_does(asked: Path, mesh: str) -> None:
    one, two = found(asked, f"one-two-{mesh}"), found(asked, f"two-{mesh}")
    assert two.keys() == one.keys()
    for of_steps in {"loss", "grad_norm", "critic"} & two.keys():
        np.testing.assert_allclose(two[of_steps], one[of_steps], rtol=1e-5)
    for of_tokens in {"kept", "logp", "reference", "values"} & two.keys():
        np.testing.assert_allclose(two[of_tokens], one[of_tokens], atol=1e-4)
    assert list(two["weights"]) == list(one["weights"])
    np.testing.assert_allclose(list(two["weights"].values()), list(one["weights"].values()), rtol=1e-5)
    assert two["snapshot"] == pytest.approx(one["snapshot"], rel=1e-5)
    assert two["version"] == one["version"] == 4


@thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_of_one_process_goes_through_two_without_losing_a_bit(asked: Path, mesh: str) -> None:
    for tensors in (model_dir.read_tensors, model_dir.read_moments):
        before, after = (dict(tensors(asked / f"{which}-two-{mesh}")) for which in ("one", "back"))
        assert list(before) == list(after)
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name])
    assert model_dir.read_trainer_state(asked / f"back-two-{mesh}") == model_dir.read_trainer_state(asked / f"one-two-{mesh}")
