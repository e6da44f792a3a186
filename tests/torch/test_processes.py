"""Several processes train one model, each on a CPU, over gloo."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from tests.launching import finished
from tests.models import DELTA, DIVISIBLE, EVEN, EXPERTS, FULL, RULE, SHARING, SIZES, write_config, write_random
from tests.thorough import further, run_values

from .processes import trainer_of
from .test_trainer import save_model

MESHES = {
    "fsdp": ("qwen3", {"fsdp": 2}),
    "tied": ("qwen2", {"fsdp": 2}),
    "distilled": ("taught", {"tensor": 2}),
    "capped": ("gemma", {"tensor": 2}),
    "context": ("taught", {"context": 2}),
    "mixture": ("moe", {"fsdp": 2}),
    "mixture-tensor": ("moe", {"tensor": 2}),
    "adapters-fsdp": ("adapted", {"fsdp": 2}),
    "adapters-tensor": ("adapted", {"tensor": 2}),
    "images-fsdp": ("qwen3_vl", {"fsdp": 2}),
    "images-tensor": ("qwen3_vl", {"tensor": 2}),
    "hybrid-fsdp": ("hybrid", {"fsdp": 2}),
    "hybrid-tensor": ("hybrid-moe", {"tensor": 2}),
    "hybrid-adapters": ("hybrid-adapted", {"tensor": 2}),
    "stages": ("qwen2", {"stage": 2}),
    "stages-chunks": ("deep", {"stage": 2, "stage_chunks": 2}),
    "stages-distilled": ("taught", {"stage": 2}),
    "stages-adapters": ("adapted", {"stage": 2}),
    "stages-mixture": ("moe", {"stage": 2}),
    "stages-hybrid": ("hybrid", {"stage": 2}),
    # Of four processes:
    "both": ("qwen3", {"fsdp": 2, "tensor": 2}),
    "copies": ("qwen2", {"data": 2, "tensor": 2}),
    "context-tensor": ("gemma", {"context": 2, "tensor": 2}),
    "context-experts": ("moe", {"context": 2, "expert": 2}),
    "experts-tensor": ("shared-moe", {"expert": 2, "tensor": 2}),
    "sinks": ("sinks-moe", {"context": 2, "expert": 2}),
    "biased-experts": ("sinks-moe", {"fsdp": 2, "expert": 2}),
    "latent-tensor": ("sigmoid-moe", {"fsdp": 2, "tensor": 2}),
    "mixture-fsdp-tensor": ("moe", {"fsdp": 2, "tensor": 2}),
    "experts-adapters": ("moe-adapted", {"expert": 2, "tensor": 2}),
    "experts-adapters-fsdp": ("moe-adapted", {"fsdp": 2, "expert": 2}),
    "adapters-both": ("adapted-seeing", {"fsdp": 2, "tensor": 2}),
    "squares": ("gemma3_vl-headed", {"fsdp": 2}),
    "rows": ("mistral3_vl", {"fsdp": 2}),
    "placed": ("gemma4_vl", {"fsdp": 2}),
    "hybrid-context": ("hybrid", {"fsdp": 2, "context": 2}),
    "hybrid-experts": ("hybrid-moe", {"context": 2, "expert": 2}),
    "stages-fsdp": ("qwen2", {"stage": 2, "fsdp": 2}),
    "stages-tensor": ("gemma", {"stage": 2, "tensor": 2}),
    "stages-experts": ("sigmoid-moe", {"stage": 2, "expert": 2}),
    "stages-context": ("sinks-moe", {"stage": 2, "context": 2}),
    "stages-hybrid-adapters": ("hybrid-adapted", {"stage": 2, "fsdp": 2}),
    "stages-expert-adapters": ("moe-adapted", {"stage": 2, "expert": 2}),
    "four-stages": ("deep", {"stage": 4}),
}
FIRST = ("fsdp", "distilled", "stages")
CASES = [*FIRST, *further(*(mesh for mesh in MESHES if mesh not in FIRST))]
TOGETHER = ("data", "fsdp", "expert", "context", "tensor", "stage")  # axes that take processes
# Models that are others' under a second name.
SAME = {"taught": "qwen3", "adapted": "qwen2", "adapted-seeing": "qwen2_5_vl", "hybrid-adapted": "hybrid"}
SAME |= {"moe-adapted": "shared-moe"}
# What else is asked of a model, by its name.
MORE: dict[str, dict[str, Any]] = {
    "taught": {"teacher": "qwen2"},
    "gemma": {"changes": {"remat": "layers"}},
    "adapted": {"lora": {"rank": 3}},
    "adapted-seeing": {"lora": {"rank": 3}},
    "moe-adapted": {"lora": {"rank": 3, "targets": ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")}},
    "hybrid-adapted": {"lora": {"rank": 3}},
}

# 6 experts, of which 4 processes have no even part, in both of two layers.
SIX_EXPERTS = DIVISIBLE["even-moe"] | {"num_experts": 6, "num_hidden_layers": 2, "decoder_sparse_step": 1}

# Layers that neither two stages of two chunks nor four stages share evenly.
DEEP = SIZES | EVEN | {"model_type": "qwen3", "num_hidden_layers": 5, "head_dim": 16, "tie_word_embeddings": True}

# An expert beside those that are chosen.
SHARED = SIZES | EVEN | EXPERTS | {"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 24}
# Experts with biases, unevenly many for each of two processes that share them, and attention with sinks.
SINKS = SIZES | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
SINKS |= {"layer_types": ["sliding_attention", "full_attention"]}
# The same, in layers behind a dense one, with routers of another kind, and attention that is not divided.
SIGMOID = SIZES | EVEN | EXPERTS | {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1}
SIGMOID |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 8}
SIGMOID |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}

# Gated delta rule layers among those with attention, alone and before mixtures.
HYBRID = SIZES | EVEN | DELTA | {"model_type": "qwen3_5_text", "layer_types": [RULE, FULL, RULE], "num_hidden_layers": 3}
HYBRID_MOE = HYBRID | SHARING | {"model_type": "qwen3_next", "num_experts": 8, "linear_conv_kernel_dim": 3}
HYBRID_MOE |= {"num_hidden_layers": 2, "layer_types": [RULE, FULL]}


@pytest.fixture(scope="module")
def meshes(request: pytest.FixtureRequest) -> dict[str, tuple[str, dict[str, int]]]:
    """The meshes that this session asks for, by their names."""
    return {mesh: MESHES[mesh] for mesh in MESHES if mesh in run_values(request, "mesh") | {"fsdp"}}


@pytest.fixture(scope="module")
def folder(meshes: Mapping[str, tuple[str, dict[str, int]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what one process found of them, one-NAME.json, and saved."""
    folder = tmp_path_factory.mktemp("processes")
    save_model(folder / "qwen3", "qwen3", head_dim=16, tie_word_embeddings=False)
    save_model(folder / "qwen2", "qwen2", tie_word_embeddings=True)
    write_random("even-gemma3", folder / "gemma")
    write_config(DEEP, folder / "deep")
    write_config(SIX_EXPERTS, folder / "moe")
    write_config(SHARED, folder / "shared-moe")
    write_config(SINKS, folder / "sinks-moe")
    write_config(SIGMOID, folder / "sigmoid-moe")
    write_config(HYBRID, folder / "hybrid")
    write_config(HYBRID_MOE, folder / "hybrid-moe")
    write_random("qwen3_vl", folder / "qwen3_vl")
    write_random("qwen2_5_vl", folder / "qwen2_5_vl")
    for name in ("gemma3_vl-headed", "mistral3_vl", "gemma4_vl"):
        write_random(name, folder / name)
    for name, of in SAME.items():
        (folder / name).symlink_to(folder / of)
    find(folder, 1, {f"one-{model}": (model, {}) for model, _ in meshes.values()})
    for name, (model, _) in meshes.items():
        for form in ("one", "sharded-one"):
            (folder / f"{form}-{name}").symlink_to(folder / f"{form}-{model}")
    return folder


AT_ONCE = 8  # meshes that one start of the processes is asked for: these have a time limit


def processes_of(mesh: Mapping[str, int]) -> int:
    return prod(mesh.get(axis, 1) for axis in TOGETHER)


def find(folder: Path, processes: int, meshes: Mapping[str, tuple[str, dict[str, int]]]) -> None:
    """Has so many processes do everything on each mesh, NAME.json, having read what the one had saved."""
    asked = []
    for name, (model, mesh) in meshes.items():
        more = {what: str(folder / x) if what == "teacher" else x for what, x in MORE.get(model, {}).items()}
        if "moe" in model:  # how unevenly experts are chosen is said of what is computed at once
            shares = mesh.get("fsdp", 1) * mesh.get("expert", 1)
            more["changes"] = {"micro_batch_rows": 4 // shares, "balance": 0.3, "replay_experts": True}
            more["changes"] |= {"balance_rate": 0.1} if "sigmoid" in model else {}
        asked.append({"name": name, "directory": str(folder / model), "processes": processes, **more, **mesh})
    for begin in range(0, len(asked), AT_ONCE):
        part = map(json.dumps, asked[begin : begin + AT_ONCE])
        finished([sys.executable, "-m", "tests.torch.processes", str(folder), *part], processes, 1, folder)


@pytest.fixture(scope="module")
def of_two(folder: Path, meshes: Mapping[str, tuple[str, dict[str, int]]]) -> Path:
    find(folder, 2, {name: of for name, of in meshes.items() if processes_of(of[1]) == 2})
    return folder


@pytest.fixture(scope="module")
def of_four(folder: Path, meshes: Mapping[str, tuple[str, dict[str, int]]]) -> Path:
    find(folder, 4, {name: of for name, of in meshes.items() if processes_of(of[1]) == 4})
    return folder


@pytest.fixture
def asked(mesh: str, request: pytest.FixtureRequest) -> Path:
    """Where it lies what a mesh's processes found."""
    found: Path = request.getfixturevalue({2: "of_two", 4: "of_four"}[processes_of(MESHES[mesh][1])])
    return found


def in_one_worker(test: Callable[..., None]) -> Callable[..., None]:
    """One worker asks, once for all."""
    for mark in (pytest.mark.xdist_group("meshes"), pytest.mark.timeout(1500), pytest.mark.slow):
        test = mark(test)
    return test


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@in_one_worker
@pytest.mark.parametrize("mesh", CASES)
def test_several_processes_learn_what_one_does(asked: Path, mesh: str) -> None:
    one, two = found(asked, f"one-{MESHES[mesh][0]}"), found(asked, mesh)
    for alone, together in zip(one["updates"], two["updates"], strict=True):
        assert together == pytest.approx(alone, rel=1e-5, abs=1e-6)
        assert alone["grad_norm"] > 0.05  # else the clip is not tested
    np.testing.assert_allclose(two["critic"], one["critic"], rtol=1e-5)
    for of_tokens in ("before", "kept", "logp", "reference", "values"):
        np.testing.assert_allclose(two[of_tokens], one[of_tokens], atol=1e-5)
    for tensors in ("weights", "drawn_with", "critic weights"):
        assert list(two[tensors]) == list(one[tensors])
        for name, x in one[tensors].items():
            np.testing.assert_allclose(two[tensors][name], x, atol=1e-6, err_msg=name)
    assert two["on the device"] == two["weights"]
    assert two["version"] == 3


@in_one_worker
@pytest.mark.parametrize("mesh", CASES)
def test_a_step_that_is_not_finite_is_skipped_by_all(asked: Path, mesh: str) -> None:
    assert found(asked, mesh)["skipped"] == 1


def assert_same(directory: Path, expected: Path) -> None:
    trained = adapters.read if model_dir.is_adapter(expected) else model_dir.read_tensors
    for tensors in (trained, model_dir.read_moments):
        before, after = (dict(tensors(x)) for x in (expected, directory))
        assert before.keys() == after.keys()
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name])
    assert model_dir.read_trainer_state(directory) == model_dir.read_trainer_state(expected)


@in_one_worker
@pytest.mark.parametrize("mesh", CASES)
def test_a_state_of_one_process_goes_through_several_without_losing_a_bit(asked: Path, mesh: str) -> None:
    assert_same(asked / f"back-{mesh}", asked / f"one-{mesh}")
    one = found(asked, f"one-{MESHES[mesh][0]}")
    np.testing.assert_allclose(found(asked, mesh)["logp of one"], one["logp"], atol=1e-5)


@in_one_worker
@pytest.mark.parametrize("mesh", [*FIRST, *further(*(mesh for mesh in MESHES if mesh not in FIRST and "adapters" not in mesh))])
def test_parts_are_read_by_several_processes_and_by_one_bit_for_bit(asked: Path, mesh: str, tmp_path: Path) -> None:
    one = asked / f"one-{mesh}"
    assert_same(asked / f"resharded-{mesh}", one)  # written by one, read by several
    alone = trainer_of(str(asked / MESHES[mesh][0]), {})
    alone.restore(asked / f"sharded-{mesh}")
    alone.save(tmp_path)
    assert_same(tmp_path, one)
    with pytest.raises(UserError, match="a sharded checkpoint of the torch backend"):
        model_dir.check_portable(asked / f"sharded-{mesh}")


@in_one_worker
def test_parts_of_another_model_or_none_are_refused(of_two: Path, tmp_path: Path) -> None:
    of_another = trainer_of(str(of_two / "qwen2"), {})
    with pytest.raises(UserError, match=r"another model or optimizer: its exp_avg\.lm_head\.weight has the shape"):
        of_another.restore(of_two / "sharded-fsdp")
    files = sorted(path.name for path in (of_two / "sharded-fsdp" / "shards").iterdir())
    assert len(files) == 3  # of two processes, and the shapes
    for name in files:
        copied = shutil.copytree(of_two / "sharded-fsdp", tmp_path / f"without {name}")
        (copied / "shards" / name).unlink()
        with pytest.raises(UserError, match=r"is not whole.*: copy the checkpoint again"):
            trainer_of(str(of_two / "qwen3"), {}).restore(copied)
