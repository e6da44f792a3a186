"""Models that cannot be trained, and damaged directories: one sentence, from `check` as from the trainer, of either backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_x.errors import UserError
from areal_x.protocols.backends import create_trainer, find_backend
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.models import write_model
from tests.models import SIZES, write_config

MULTI_HEAD_LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
UNTRAINED: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {
        **SIZES,
        "model_type": "llama4_text",
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
    },
    "DeepseekV32ForCausalLM": {**MULTI_HEAD_LATENT, "model_type": "deepseek_v32"},
    "GlmMoeDsaForCausalLM": {**MULTI_HEAD_LATENT, "model_type": "glm_moe_dsa"},
}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def changed(**changes: Any) -> Callable[[Path], Any]:
    def change(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text()) | changes
        (directory / CONFIG).write_text(json.dumps({name: x for name, x in config.items() if x is not None}))

    return change


def written(name: str, content: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(content)


def cut(share: float) -> Callable[[Path], Any]:
    def change(directory: Path) -> None:
        whole = (directory / WEIGHTS).read_bytes()
        (directory / WEIGHTS).write_bytes(whole[: int(share * len(whole))])

    return change


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an architecture that nobody knows": (
        changed(architectures=["MysteryForCausalLM"], model_type="mystery"),
        "mystery|Mystery",
    ),
    "no model_type": (changed(model_type=None), "model_type"),
    "a field of another type": (changed(num_hidden_layers="two"), "num_hidden_layers"),
    "a config that is not JSON": (written(CONFIG, '{"model_type": "qw'), r"config\.json is not JSON \(.*\): copy it again"),
    "a config that is a list": (written(CONFIG, "[]"), r"config\.json contains a list instead of an object"),
    "a config that is no text": (lambda directory: (directory / CONFIG).write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "weights cut in their tensors": (cut(0.9), rf"{WEIGHTS} is not a whole safetensors file \(.*\): copy it again"),
    "weights cut in their head": (cut(0.001), "is not a whole safetensors file"),
    "weights of nothing": (cut(0), "is not a whole safetensors file"),
    "a page of an error as weights": (written(WEIGHTS, "<html>404</html>"), "is not a whole safetensors file"),
    "an index without its file": (
        written(INDEX, json.dumps({"weight_map": {"a": "model-1.safetensors"}})),
        r"lacks the files model-1\.safetensors",
    ),
    "an index that is not JSON": (written(INDEX, "{"), r"index\.json is not JSON"),
    "an index of nothing": (written(INDEX, "{}"), r"index\.json has no weight_map"),
    "tensors of another size": (changed(intermediate_size=95), r"mlp\.\w+_proj\.weight"),
    "tensors of fewer layers": (changed(num_hidden_layers=3), r"model\.layers\.2\."),
}


def both_refuse(backend: str, directory: Path, says: str) -> None:
    config = TrainerConfig(ModelConfig(str(directory)))
    for look in (find_backend(backend).load().check, lambda config: create_trainer(backend, config)):
        with pytest.raises(UserError, match=says) as caught:
            look(config)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_one_sentence(damage: str, backend: str, tmp_path: Path) -> None:
    change, says = DAMAGES[damage]
    change(write_model(tmp_path))
    both_refuse(backend, tmp_path, says)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_config(UNTRAINED[name], tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_model_that_a_backend_does_not_train_is_named(name: str, backend: str, untrained: Callable[[str], Path]) -> None:
    both_refuse(backend, untrained(name), f"{name}.*")


def test_a_llama_4_that_sees_is_named(backend: str, tmp_path: Path) -> None:
    write_model(
        tmp_path, architectures=["Llama4ForConditionalGeneration"], model_type="llama4", vision_config={}, text_config={}
    )
    both_refuse(backend, tmp_path, "llama4|Llama4ForConditionalGeneration")
