"""Routers that choose by sigmoids, groups and biases, against transformers' own; and biases that no step changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.hf.model_dir import read_config, read_moments, read_tensors, write_tensors
from areal_x.protocols.backends import create_trainer, find_backend
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_jax.experts import route
from areal_x_jax.mixtures import Experts
from areal_x_jax.routers import Router
from tests.experts import SIGMOIDS, assert_replays, recorded, sigmoid_imbalance
from tests.model_families import CASES
from tests.models import trajectories, write_config
from tests.thorough import further, thorough

from .test_trainer import LENGTHS, OPTIMIZER, STILL, learnable, make_trainer

BIAS = "e_score_correction_bias"
COUNT, HIDDEN = 12, 16
# How transformers' router is made → ours.
RULES: dict[str, tuple[str, dict[str, Any], Router]] = {
    "sigmoids of the best groups": (
        "deepseek_v3",
        {"n_routed_experts": COUNT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        Router("sigmoid", True, 4, 2, 2, 2.5, exact=True),
    ),
    "sigmoids of all, as they are": (
        "glm4_moe",
        {"n_routed_experts": COUNT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        Router("sigmoid", True, exact=True),
    ),
    "a softmax of the best groups": (
        "deepseek_v2",
        {"n_routed_experts": COUNT, "n_group": 3, "topk_group": 1, "topk_method": "group_limited_greedy"},
        Router("softmax", False, 3, 1, 1, exact=True),
    ),
    "a softmax with a bias": (
        "ernie4_5_moe",
        {"moe_num_experts": COUNT, "moe_norm_min": 0.6},
        Router("softmax", True, least=0.6),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_router_chooses_and_weighs_as_transformers_does(name: str) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    kinds = DeepseekV3TopkRouter, Glm4MoeTopkRouter, DeepseekV2TopkRouter, Ernie4_5_MoeTopKRouter
    made = dict(zip(("deepseek_v3", "glm4_moe", "deepseek_v2", "ernie4_5_moe"), kinds, strict=True))
    model_type, config, rule = RULES[name]
    config = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_experts_per_tok": 3, **config}
    torch.manual_seed(0)
    theirs = made[model_type](AutoConfig.for_model(model_type, **config))
    bias = None
    with torch.no_grad():
        for x in (*theirs.parameters(), *theirs.buffers()):
            torch.nn.init.normal_(x, 0.0, 0.3)
        tokens = torch.randn(200, HIDDEN)
        _, weights, chosen = theirs(tokens)
        if rule.corrected:
            bias = jnp.asarray(next(x for key, x in theirs.state_dict().items() if key.endswith(BIAS)).numpy())
    normalised = config.get("norm_topk_prob", model_type == "ernie4_5_moe")
    experts = Experts(COUNT, 3, 5, normalised, router=rule)
    kernel = jnp.asarray(theirs.weight.detach().numpy().T)
    found = route(experts, kernel, jnp.asarray(tokens.numpy()), correction=bias)

    def by_expert(weights: Any, chosen: Any) -> np.ndarray:
        every = np.zeros((200, COUNT))
        np.put_along_axis(every, np.asarray(chosen), np.asarray(weights), axis=-1)
        return every

    np.testing.assert_allclose(by_expert(found.weights, found.chosen), by_expert(weights, chosen), atol=1e-6)
    np.testing.assert_allclose(np.asarray(found.probabilities).sum(-1), 1, rtol=1e-5)
    if bias is not None:  # which does choose
        plain = route(experts, kernel, jnp.asarray(tokens.numpy()), correction=0 * bias)
        assert (np.sort(plain.chosen) != np.sort(found.chosen)).any()


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_config(CASES[name], tmp_path_factory.mktemp(name), seed=len(name)))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return learnable(pack(trajectories(*LENGTHS), 32))


@pytest.mark.parametrize("normalised", [True, *further(False)])
def test_routers_with_sigmoids_are_pushed_and_replayed(normalised: bool, tmp_path: Path) -> None:
    directory = write_config(SIGMOIDS | {"norm_topk_prob": normalised}, tmp_path)
    made = [replace(t, experts=recorded(len(t), i)) for i, t in enumerate(trajectories(12, 7, 20, 9))]
    trainer = make_trainer(directory, replay_experts=True)
    assert_replays(trainer, make_trainer(directory), directory, made, pack(made, 32))
    batch = learnable(pack(made, 64))
    pushed = make_trainer(directory, optimizer=STILL, balance=0.5).update(batch, losses.sft)
    assert pushed["expert_imbalance"] == pytest.approx(sigmoid_imbalance(directory, made), rel=1e-5)


def biases(tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: x for name, x in tensors if name.endswith(BIAS)}


@thorough
def test_a_bias_that_chooses_experts_is_exact_and_no_step_changes_it(
    batch: Batch, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = directory_of("deepseek_v3-0")
    loaded = biases(read_tensors(directory))
    assert len(loaded) == 2
    assert all(x.dtype == np.float32 and np.any(x.astype(jnp.bfloat16) != x) for x in loaded.values())
    trainer = make_trainer(directory, precision="bf16")
    before = dict(trainer.weights())
    trainer.update(batch, losses.ppo_clip)
    after = dict(trainer.weights())
    assert {str(x.dtype) for name, x in after.items() if name not in loaded} == {"bfloat16"}
    assert all(np.array_equal(after[name], x) and after[name].dtype == x.dtype for name, x in loaded.items())
    assert all(np.any(after[name] != before[name]) for name in after if ".self_attn." in name)
    trainer.save(tmp_path)
    assert not biases(read_moments(tmp_path))
    assert all(np.array_equal(x, loaded[name]) for name, x in biases(read_tensors(tmp_path)).items())
    adapted = make_trainer(directory, precision="bf16", lora=LoRAConfig(rank=2, targets=("o_proj",)))
    published = biases(adapted.weights())
    assert all(np.array_equal(published[name], x) and published[name].dtype == x.dtype for name, x in loaded.items())


def test_layers_that_predict_further_tokens_are_left_out_as_transformers_does(
    batch: Batch, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = directory_of("deepseek_v3-0")
    copied = dict(read_tensors(directory))
    last = {name.replace(".2.", ".3."): x for name, x in copied.items() if ".layers.2." in name}
    others = {"model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32)}
    others["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    write_tensors(tmp_path / "model.safetensors", (copied | last | others).items())
    config = read_config(directory) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    find_backend("jax").load().check(TrainerConfig(ModelConfig(str(tmp_path))))
    ours, plain = (make_trainer(path).logprobs(batch) for path in (tmp_path, directory))
    np.testing.assert_array_equal(ours, plain)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"left over .*model\.layers\.3\."):
        make_trainer(tmp_path)


@thorough
@pytest.mark.parametrize("name", ["deepseek_v3-0", "deepseek_v2-0", "glm4_moe-0"])
def test_both_backends_update_alike_and_read_each_others_checkpoints(
    name: str, batch: Batch, directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = TrainerConfig(ModelConfig(str(directory_of(name))), OPTIMIZER, balance=0.1)
    ours, theirs = (create_trainer(backend, config) for backend in ("jax", "torch"))
    for _ in range(3):
        mine, other = (trainer.update(batch, losses.ppo_clip) for trainer in (ours, theirs))
        for metric in ("loss", "grad_norm", "expert_imbalance"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-6), metric
    np.testing.assert_allclose(ours.logprobs(batch), theirs.logprobs(batch), atol=1e-3)
    for writer, reader in ((ours, theirs), (theirs, ours)):
        writer.save(tmp_path / writer.backend)
        reader.restore(tmp_path / writer.backend)
        written, read = (trainer.update(batch, losses.ppo_clip)["loss"] for trainer in (writer, reader))
        assert read == pytest.approx(written, rel=1e-4)
