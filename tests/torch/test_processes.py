"""Several processes train one model, each on a CPU, over gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from areal_x import model_dir
from tests.starting import finished

from .test_trainer import save_model

MESHES = {
    "fsdp": ("qwen3", {"fsdp": 2}),
    "tied": ("qwen2", {"fsdp": 2}),
    "data": ("qwen3", {"data": 2}),
    "tensor": ("qwen3", {"tensor": 2}),
    "tied_tensor": ("qwen2", {"tensor": 2}),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process found, one-NAME.json, and two, NAME.json, having read what the one had saved."""
    folder = tmp_path_factory.mktemp("processes")
    models = {
        "qwen3": save_model(folder / "qwen3", "qwen3", head_dim=16, tie_word_embeddings=False),
        "qwen2": save_model(folder / "qwen2", "qwen2", tie_word_embeddings=True),
    }

    def find(processes: int, meshes: dict[str, tuple[str, dict[str, int]]]) -> None:
        asked = (
            json.dumps({"name": name, "directory": str(models[model]), "processes": processes, **mesh})
            for name, (model, mesh) in meshes.items()
        )
        finished([sys.executable, "-m", "tests.torch.processes", str(folder), *asked], processes, 1, folder)

    find(1, {f"one-{model}": (model, {}) for model in models})
    for name, (model, _) in MESHES.items():
        (folder / f"one-{name}").symlink_to(folder / f"one-{model}")
    find(2, MESHES)
    return folder


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_learn_what_one_does(asked: Path, mesh: str) -> None:
    one, two = found(asked, f"one-{MESHES[mesh][0]}"), found(asked, mesh)
    for alone, together in zip(one["updates"], two["updates"], strict=True):
        assert together == pytest.approx(alone, rel=1e-5, abs=1e-6)
        assert alone["grad_norm"] > 0.05  # else the clip is not tested
    np.testing.assert_allclose(two["critic"], one["critic"], rtol=1e-5)
    for of_tokens in ("before", "logp", "reference", "values"):
        np.testing.assert_allclose(two[of_tokens], one[of_tokens], atol=1e-5)
    for tensors in ("weights", "drawn_with"):
        assert list(two[tensors]) == list(one[tensors])
        for name, x in one[tensors].items():
            np.testing.assert_allclose(two[tensors][name], x, atol=1e-6, err_msg=name)
    assert two["two"] == list(one["weights"])[:2]
    assert two["version"] == 4


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_that_is_not_finite_is_skipped_by_both(asked: Path, mesh: str) -> None:
    assert found(asked, mesh)["skipped"] == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_of_one_process_goes_through_two_without_losing_a_bit(asked: Path, mesh: str) -> None:
    for tensors in (model_dir.read_tensors, model_dir.read_moments):
        before, after = (dict(tensors(asked / f"{which}-{mesh}")) for which in ("one", "back"))
        assert before.keys() == after.keys()
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name])
    assert model_dir.read_state(asked / f"back-{mesh}") == model_dir.read_state(asked / f"one-{mesh}")
    one = found(asked, f"one-{MESHES[mesh][0]}")
    np.testing.assert_allclose(found(asked, mesh)["logp of one"], one["logp"], atol=1e-5)
