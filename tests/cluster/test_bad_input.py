"""Mistakes that show only on a real cluster: one sentence each, and nothing is left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_x.cluster.connection import why_unusable
from areal_x.monitor.metrics import read
from areal_x.run import checkpoint
from tests.cluster.cluster import Cluster, cluster, ended
from tests.cluster.nodes import can_make_nodes
from tests.conftest import environment_with
from tests.launching import WRITTEN, command_of, finished, started

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

RAY, TORCH = "train.cluster = 'ray'", "train.backend = 'torch'"


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(1) as made:
        yield made


def test_versions_that_differ_are_one_sentence() -> None:
    """Ray's own error, whose text may change with its version."""
    from ray._private import utils

    own_ray, own_python = utils.compute_version_info()
    with pytest.raises(RuntimeError) as refused:
        utils.check_version_info({"ray_version": "2.0.0", "python_version": "3.8.1"}, "node 10.0.0.7")
    assert why_unusable(refused.value) == (
        f"has Ray 2.0.0 and Python 3.8.1, this process Ray {own_ray} and Python {own_python}: install the same versions"
        " on all nodes"
    )


JOIN = """
from ray._private import utils
utils.compute_version_info = lambda: ("2.0.0", "3.8.1")
from areal_x.cluster.connection import connected
from areal_x.errors import UserError
try:
    with connected(cpus=1):
        print("connected")
except UserError as error:
    print(f"error: {error}")
"""


@pytest.mark.cluster
def test_a_driver_of_another_version_is_refused(ray: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env=environment_with(1, **ray.environment), capture_output=True, text=True, timeout=100
    )
    differ = r"has Ray \S+ and Python \S+, this process Ray 2\.0\.0 and Python 3\.8\.1: install .+"
    assert re.fullmatch(rf"error: the Ray cluster at {ray.address} {differ}\n", done.stdout), done.stderr


@contextmanager
def node_with_its_own(folder: Path, ray: Cluster) -> Iterator[None]:
    """Another node of the cluster, with other files in this folder: none but an empty run's."""
    script = """
    set -e
    mount --make-rprivate /
    mount -t tmpfs tmpfs "$1"
    mkdir -p "$1/run/logs"
    shift
    exec "$@"
    """
    words = ["unshare", "--mount", "bash", "-c", script, "bash", str(folder), str(Path(sys.executable).with_name("ray"))]
    words += ["start", "--block", "--address", ray.address, "--num-cpus", "2", "--object-store-memory", str(100 << 20)]
    words += ["--dashboard-agent-listen-port", "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, env=os.environ | ray.environment, stdout=quiet, stderr=quiet) as node, ended(node):
        yield


@pytest.mark.cluster
@pytest.mark.skipif(not can_make_nodes(), reason="needs a mount namespace")
def test_a_node_with_other_files_is_refused(ray: Cluster, tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Each node has room for one of the two.
    command = command_of(tiny_model_dir, folder, WRITTEN, RAY, TORCH, "mesh.fsdp = 2", "cluster.cpus = 2")
    (folder / "runs").mkdir()
    with node_with_its_own(folder / "runs", ray), started(command, 1, 1, folder, **ray.environment) as (process,):
        assert process.wait(timeout=200) == 1, (folder / "out-0").read_text()
    said = (folder / "err-0").read_text().strip().splitlines()[-1]
    assert re.fullmatch(r"error: the node \S+ has another folder \S+/logs than the driver: train\.runs must be .+", said), said


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["portable", "sharded"])
def test_a_run_of_two_ranks_resumes_on_another_mesh_and_on_one(
    kind: str, ray: Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = folder / "runs" / "run"
    of_all = f"trainer.checkpoint = {kind!r}", TORCH

    def until(steps: int, *bindings: str) -> None:
        words = [x for b in (*of_all, f"train.steps = {steps}", *bindings) for x in ("-b", b)]
        resume = ["--resume"] if run.exists() else []
        finished([*command, *words, *resume], 1, 1, folder, **ray.environment)
        assert checkpoint.steps(run)[-1] == steps

    command = command_of(tiny_model_dir, folder, WRITTEN)
    until(3, RAY, "mesh.fsdp = 2")
    until(6, RAY, "mesh.fsdp = 1", "mesh.data = 2")
    until(9, "train.cluster = 'here'", "mesh.processes = 1", "mesh.fsdp = 1", "mesh.data = 1")
    rows = read(run)
    assert [row["step"] for row in rows] == list(range(10))
    whole = tmp_path / "whole"
    alone = "train.cluster = 'here'", "mesh.processes = 1", "mesh.fsdp = 1", "train.steps = 9"
    finished(command_of(tiny_model_dir, whole, WRITTEN, *of_all, *alone), 1, 1, whole)
    expected = [row["loss"] for row in read(whole / "runs" / "run")[1:]]
    assert [row["loss"] for row in rows[1:]] == pytest.approx(expected, rel=1e-4)
