"""A node whose cable is cut."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from areal_x.monitor.metrics import read
from areal_x.run import checkpoint
from tests.conftest import environment_with
from tests.launching import WRITTEN, command_of

from . import cables
from .test_on_ray import TORCH, TWO, rank, wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600), pytest.mark.cluster]


def test_a_run_goes_on_without_a_node_whose_cable_was_cut(tiny_model_dir: Path, tmp_path: Path) -> None:
    if not cables.available():
        pytest.skip("no network namespaces on this machine")
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, WRITTEN, TORCH, *TWO, "train.steps = 100")
    run = folder / "runs" / "run"
    with tempfile.TemporaryDirectory(prefix="r") as short, cables.wired(3, Path(short)) as nodes:
        out, err = (folder / f"{name}-0" for name in ("out", "err"))
        environment = environment_with(1, **nodes.environment)
        with (
            out.open("w") as says,
            err.open("w") as fails,
            subprocess.Popen(nodes.inside(0, *command), cwd=folder, env=environment, stdout=says, stderr=fails) as process,
        ):
            wait_for(lambda: checkpoint.steps(run), process, folder)
            nodes.cut(nodes.node_of(rank(1, run).pid))
            assert process.wait(timeout=400) == 0, err.read_text()
    assert re.search(r"rank [01] is gone: .*; the run continues", out.read_text()), out.read_text()
    assert [row["step"] for row in read(run)] == list(range(101))
