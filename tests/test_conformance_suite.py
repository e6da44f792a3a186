"""The conformance suite finds a backend that does not conform, and runs for one that is installed by its entry point alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.thorough import further

pytest.importorskip("areal_x_torch")

BROKEN = '''
"""The torch backend with a bug of its own."""
import numpy as np
from areal_x_torch import DEVICES_EACH, TRANSPORTS, check, differentiate, join
from areal_x_torch.trainer import Trainer


class Rolled(Trainer):
    def logprobs(self, batch):
        return np.roll(super().logprobs(batch), 1, axis=1)


class Stuck(Trainer):
    def update(self, batch, loss):
        try:
            return super().update(batch, loss)
        finally:
            self.version = 0


create_trainer = {bug}
'''
# Of each bug one test that must see it, and one that does not.
SEEN = {
    "Rolled": ("test_logprobs_are_those_of_each_sequence_alone", "test_the_loss_is_the_weighted_sum_of_the_terms"),
    "Stuck": ("test_the_loss_is_the_weighted_sum_of_the_terms", "test_logprobs_are_those_of_each_sequence_alone"),
}


def install(directory: Path, bug: str) -> None:
    """Puts a distribution with the backend "broken" on the path of `directory`."""
    (directory / "broken_backend.py").write_text(BROKEN.replace("{bug}", bug))
    metadata = directory / "broken_backend-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backend\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[areal_x.backends]\nbroken = broken_backend\n")


@pytest.mark.parametrize("bug", [*list(SEEN)[:1], *further(*list(SEEN)[1:])])
def test_a_broken_backend_fails(bug: str, tmp_path: Path) -> None:
    install(tmp_path, bug)
    found, passed = SEEN[bug]
    command = [sys.executable, "-m", "areal_x.testing.conformance", "--backend", "broken", "-p", "no:cacheprovider", "-rA"]
    answer = subprocess.run(
        [*command, "-k", f"{found} or {passed}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert re.search(rf"^FAILED .*::{found}\[broken\]", answer.stdout, re.M), answer.stdout + answer.stderr
    assert re.search(rf"^PASSED .*::{passed}\[broken\]", answer.stdout, re.M), answer.stdout
    assert answer.returncode == 1


def test_no_test_of_the_suite_hides_another() -> None:
    """tests/test_backends_conform.py imports them all into one module."""
    modules = ("construction", "files", "forward", "sampler", "update")
    package = "areal_x.testing.conformance"
    names = [name for m in modules for name in vars(import_module(f"{package}.test_{m}")) if name.startswith("test_")]
    assert len(names) == len(set(names)) > 50
