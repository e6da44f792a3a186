"""The cookbook's recipes, unmodified but for URL, model and a tiny local dataset (examples/tinker/world.py): they learn.
TINKER_PYTHON's environment needs tinker-cookbook[math-rl] and datasets. TINKER_CURVES names a file for the curves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tinker.world import CONTEXT, NAME, write
from tests.tinker.test_client import PYTHON, needs_client, serving

pytestmark = [needs_client, pytest.mark.thorough, pytest.mark.timeout(900)]


def run(place: Path, environment: dict[str, str], recipe: str, **settings: Any) -> list[dict[str, float]]:
    """Runs a recipe and returns what it logged."""
    assert PYTHON is not None
    clean = {name: x for name, x in environment.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    log = place / recipe
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={log}"]
    command += [f"{name}={x}" for name, x in settings.items()]
    ran = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return [json.loads(x) for x in (log / "metrics.jsonl").read_text().splitlines()]


def saved(place: Path, recipe: str) -> dict[str, Any]:
    """Returns a recipe's last checkpoint."""
    last: dict[str, Any] = json.loads((place / recipe / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert last["name"] == "final"
    return last


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_recipes_of_the_cookbook_learn(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    assert PYTHON is not None
    if subprocess.run([PYTHON, "-c", "import tinker_cookbook.recipes.rl_loop"], capture_output=True).returncode:
        pytest.skip("TINKER_PYTHON has no tinker-cookbook[math-rl]")
    write(tmp_path, backend)
    options = "--backend", backend, "--context", str(CONTEXT), "--slots", "32"
    curves: dict[str, list[float]] = {}
    with serving(tmp_path, NAME, *options) as environment:

        def learn(recipe: str, metric: str, **settings: Any) -> list[float]:
            rows = run(tmp_path, environment, recipe, **settings)
            curves[recipe] = [x[metric] for x in rows if metric in x]
            if report := os.environ.get("TINKER_CURVES"):
                Path(f"{report}-{backend}.json").write_text(json.dumps(curves))
            return curves[recipe]

        nll = learn("sl_loop", "train_mean_nll", batch_size=4, learning_rate=1e-2, lora_rank=8, save_every=3, max_length=256)
        reward = learn(
            "rl_loop", "reward/total", batch_size=4, group_size=8, learning_rate=1e-2, lora_rank=8, save_every=3, max_tokens=12
        )
        dpo = learn("preference.dpo.train", "dpo_loss", batch_size=8, learning_rate=1e-3, max_length=256)
        teacher = saved(tmp_path, "rl_loop")["sampler_path"]
        settings = {"teacher_model": NAME, "teacher_checkpoint": teacher, "dataset": "deepmath", "lora_rank": 8}
        settings |= {"groups_per_batch": 4, "group_size": 4, "max_tokens": 12, "learning_rate": 1e-2, "save_every": 4}
        kl = learn("distillation.on_policy_distillation", "teacher_kl", **settings)
    assert nll[-1] < nll[0] / 2
    assert np.mean(reward[-4:]) > np.mean(reward[:2]) + 0.3
    assert dpo[0] == pytest.approx(np.log(2), abs=1e-3)
    assert dpo[-1] < dpo[0] - 0.2
    assert np.mean(kl[-2:]) < kl[0] / 3
