"""The cookbook's recipes, unmodified but for URL, model and a tiny local dataset (examples/tinker/world.py): they learn.
TINKER_PYTHON's environment needs tinker-cookbook[math-rl] and datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.tinker_recipes import DISTILLATION, curves, has_cookbook
from tests.tinker.test_client import needs_client

pytestmark = [needs_client, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_recipes_of_the_cookbook_learn(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    if not has_cookbook():
        pytest.skip("TINKER_PYTHON has no tinker-cookbook[math-rl]")
    found = curves(tmp_path, backend)
    nll, reward, dpo, kl = (found[name] for name in ("sl_loop", "rl_loop", "preference.dpo.train", DISTILLATION))
    assert nll[-1] < nll[0] / 2
    assert np.mean(reward[-4:]) > np.mean(reward[:2]) + 0.3
    assert dpo[0] == pytest.approx(np.log(2), abs=1e-3)
    assert dpo[-1] < dpo[0] - 0.2
    assert np.mean(kl[-2:]) < kl[0] / 3
