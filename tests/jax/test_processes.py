"""Several processes train one model, each with two devices of a CPU, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x import model_dir
from tests.conftest import quick_environment

MESHES = [
    {"name": "fsdp", "optimizer": "adamw", "fsdp": 4},
    {"name": "tensor", "optimizer": "muon", "fsdp": 2, "tensor": 2},
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: Sequence[str], processes: int, devices: int, folder: Path, **more: str) -> Iterator[list[subprocess.Popen]]:
    """The same command in several processes, whose outputs go to files out-0, err-0 …; those left at the end are killed."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = quick_environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=paths, **more)
    if processes > 1:
        environment |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        made = []
        for rank in range(processes):
            out, err = (stack.enter_context((folder / f"{name}-{rank}").open("w")) for name in ("out", "err"))
            process = subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=out, stderr=err, cwd=folder)
            made.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield made


def finished(command: Sequence[str], processes: int, devices: int, folder: Path, **more: str) -> None:
    with started(command, processes, devices, folder, **more) as made:
        for rank, process in enumerate(made):
            assert process.wait(timeout=250) == 0, (folder / f"err-{rank}").read_text()


@pytest.fixture(scope="module")
def asked(model_dir_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process of four devices found, NAME.json, and two of two devices, two-NAME.json, restored from what one saved."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "tests.jax.processes", str(model_dir_of("even")), str(folder)]
    finished([*command, *(json.dumps({**mesh, "name": f"one-two-{mesh['name']}"}) for mesh in MESHES)], 1, 4, folder)
    finished([*command, *(json.dumps({**mesh, "name": f"two-{mesh['name']}", "processes": 2}) for mesh in MESHES)], 2, 2, folder)
    return folder


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_two_processes_of_two_devices_learn_what_one_of_four_does(asked: Path, mesh: str) -> None:
    one, two = found(asked, f"one-two-{mesh}"), found(asked, f"two-{mesh}")
    for of_steps in ("loss", "grad_norm", "critic"):
        np.testing.assert_allclose(two[of_steps], one[of_steps], rtol=1e-5)
    for of_tokens in ("logp", "reference", "values"):
        np.testing.assert_allclose(two[of_tokens], one[of_tokens], atol=1e-4)
    assert list(two["weights"]) == list(one["weights"])
    np.testing.assert_allclose(list(two["weights"].values()), list(one["weights"].values()), rtol=1e-5)
    assert two["snapshot"] == pytest.approx(one["snapshot"], rel=1e-5)
    assert two["two"] == list(two["weights"])[:2]
    assert two["version"] == one["version"] == 4


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_a_state_of_one_process_goes_through_two_without_losing_a_bit(asked: Path, mesh: str) -> None:
    for read in (model_dir.read_tensors, model_dir.read_moments):
        before, after = (dict(read(asked / f"{which}-two-{mesh}")) for which in ("one", "back"))
        assert list(before) == list(after)
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name])
    assert model_dir.read_state(asked / f"back-two-{mesh}") == model_dir.read_state(asked / f"one-two-{mesh}")
