"""Several processes train one model, each with two devices of a CPU, over gloo."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.hf import model_dir
from areal_x.run import checkpoint
from tests.launching import ONLINE, WRITTEN, assert_measured_alike, command_of, finished, started

MESHES = [
    {"name": "fsdp", "optimizer": "adamw", "fsdp": 4},
    {"name": "tensor", "optimizer": "muon", "fsdp": 2, "tensor": 2},
]
# The pieces of what Gloo prints, beside numbers.
GLOOS = "[Gloo] Rank ", " is connected to ", " peer ranks. ", "Expected number of connected peer ranks is : "


@pytest.fixture(scope="module")
def asked(model_dir_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of one process with four devices, one-two-NAME.json, and of two with two, two-NAME.json."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.jax.processes", str(model_dir_of("even")), str(folder)]
    finished([*command, *(json.dumps({**mesh, "name": f"one-two-{mesh['name']}"}) for mesh in MESHES)], 1, 4, folder)
    finished(
        [*command, *(json.dumps({**mesh, "name": f"two-{mesh['name']}", "processes": 2}) for mesh in MESHES)], 2, 2, folder
    )
    return folder


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_two_processes_of_two_devices_learn_what_one_of_four_does(asked: Path, mesh: str) -> None:
    one, two = found(asked, f"one-two-{mesh}"), found(asked, f"two-{mesh}")
    assert two.keys() == one.keys()
    for of_steps in {"loss", "grad_norm", "critic"} & two.keys():
        np.testing.assert_allclose(two[of_steps], one[of_steps], rtol=1e-5)
    for of_tokens in {"logp", "reference", "values"} & two.keys():
        np.testing.assert_allclose(two[of_tokens], one[of_tokens], atol=1e-4)
    assert list(two["weights"]) == list(one["weights"])
    np.testing.assert_allclose(list(two["weights"].values()), list(one["weights"].values()), rtol=1e-5)
    assert two["snapshot"] == pytest.approx(one["snapshot"], rel=1e-5)
    assert two["two"] == list(two["weights"])[:2]
    assert two["version"] == one["version"] == 4


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_a_state_of_one_process_goes_through_two_without_losing_a_bit(asked: Path, mesh: str) -> None:
    for tensors in (model_dir.read_tensors, model_dir.read_moments):
        before, after = (dict(tensors(asked / f"{which}-two-{mesh}")) for which in ("one", "back"))
        assert list(before) == list(after)
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name])
    assert model_dir.read_trainer_state(asked / f"back-two-{mesh}") == model_dir.read_trainer_state(asked / f"one-two-{mesh}")


def without_gloo(printed: str) -> str:
    """Returns the output without Gloo's. Several of its threads write lines in pieces, so that two lines may be interleaved."""
    return re.sub("|".join(map(re.escape, GLOOS)) + r"|\d+|\s+", "", printed)


def test_gloos_lines_within_each_other_are_gloos() -> None:
    pieces = [x for piece in GLOOS for x in (piece, "1")]
    assert without_gloo("".join(x + x for x in pieces) + "\n\n") == ""
    assert without_gloo("".join(pieces) + "\nstep 1\n" + "".join(pieces)) == "step"


@pytest.fixture
def command(tiny_model_dir: Path) -> Callable[..., list[str]]:
    return partial(command_of, tiny_model_dir)


def test_the_command_on_two_processes_measures_what_it_does_on_one(command: Callable[..., list[str]], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    finished(command(one, ONLINE), 1, 4, one)
    finished(command(two, ONLINE, "mesh.processes = 2"), 2, 2, two)
    assert_measured_alike(one, two)
    assert without_gloo((two / "out-1").read_text()) == ""  # it has nothing to say
    saved, alone = (dict(model_dir.read_tensors(x / "runs/run/checkpoints/2/trainer")) for x in (two, one))
    for name, x in alone.items():
        np.testing.assert_allclose(saved[name], x, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("gone, left", [(1, 0), (0, 1)])
def test_who_is_killed_ends_the_others_with_a_sentence(
    gone: int, left: int, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with started(command(folder, WRITTEN), 2, 2, folder) as processes:
        until = time.monotonic() + 200
        while not checkpoint.steps(folder / "runs" / "run"):
            assert all(process.poll() is None for process in processes), (folder / "err-0").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        processes[gone].kill()
        assert processes[left].wait(timeout=60) == 1
    assert f"error: process {gone} ended without an error message" in (folder / f"err-{left}").read_text()
