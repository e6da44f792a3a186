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
from tests.model_families import NEEDED
from tests.models import SIZES, write_config
from tests.thorough import further

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


def test_a_directory_without_weights_is_checked_by_its_config_alone(backend: str, tmp_path: Path) -> None:
    """As `check` finds a model of the hub."""
    (write_model(tmp_path) / WEIGHTS).unlink()
    find_backend(backend).load().check(TrainerConfig(ModelConfig(str(tmp_path))))
    changed(layer_types=["mamba", "full_attention"])(tmp_path)
    with pytest.raises(UserError, match=r"linear.attention"):
        find_backend(backend).load().check(TrainerConfig(ModelConfig(str(tmp_path))))


@pytest.mark.parametrize("head", ["policy", "value"])
def test_a_model_of_the_hub_takes_no_memory_for_its_weights(head: str, tmp_path: Path) -> None:
    """transformers would draw them."""
    pytest.importorskip("torch")
    from areal_x_torch.loading import build

    (write_model(tmp_path) / WEIGHTS).unlink()
    assert all(parameter.is_meta for parameter in build(tmp_path, head).parameters())


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_config(UNTRAINED[name], tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_model_that_a_backend_does_not_train_is_named(name: str, backend: str, untrained: Callable[[str], Path]) -> None:
    both_refuse(backend, untrained(name), f"{name}.*")


# What a family's parts are called, in both backends.
PARTS = {
    "deepseek_v32": "multi-head latent attention and attention to selected keys",
    "deepseek_v3": "multi-head latent attention",
    "deepseek_v4": "attention to compressed keys",
    "glm_moe_dsa": "multi-head latent attention",
    "hy_v4": "attention to selected keys",
    "kimi_linear": "multi-head latent attention and linear attention layers",
    "mistral4": "multi-head latent attention",
    "qwen4_exp": "attention to selected keys",
    "llama4": "images",
    "llama4_text": "attention in chunks",
    "qwen3_next": "gated delta rule layers",
    "qwen3_5": "images",
    "gemma3": "images",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "falcon_h1": "state-space layers",
    "rwkv": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
    "lfm2": "convolutions over tokens",
    "minimax": "linear attention layers",
    "t5": "an encoder beside its decoder",
    "bart": "an encoder beside its decoder",
    "whisper": "an encoder beside its decoder",
    "qwen2_audio": "audio",
    "clip": "images",
}
# Configs that cannot be made without a network, further packages or their parts' own configs.
UNMADE = {
    *("edgetam", "edgetam_vision_model", "encoder-decoder", "musicgen", "musicgen_melody", "nougat", "pe_audio_video", "rag"),
    *("pe_audio_video_encoder", "pe_video", "pe_video_encoder", "speech-encoder-decoder", "vision-encoder-decoder"),
    "vision-text-dual-encoder",
}


@cache
def default_config(model_type: str) -> dict[str, Any]:
    """The config.json of transformers' default model of a type, with the architecture that generates text, if it has one."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    config: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    names = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        | auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if "vision_config" in config:
        names |= auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    architectures = [names[model_type]] if model_type in names else None
    return config | NEEDED.get(model_type, {}) | {"architectures": architectures}


def refusals(look: Callable[[dict[str, Any]], Any], of_language: bool) -> dict[str, str]:
    """Returns why each of transformers' model types that a backend refuses is refused. of_language: only types that generate
    text, from text or images."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    every = set(CONFIG_MAPPING.keys())
    writes = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *PARTS}
    found = {}
    for model_type in ((every & writes) if of_language else every) - UNMADE:
        try:
            look(default_config(model_type))
        except UserError as error:
            found[model_type] = str(error)
    return found


@pytest.mark.parametrize("of_language", [True, *further(False)])
def test_every_model_type_of_transformers_can_be_trained_or_is_refused_in_a_sentence(of_language: bool, backend: str) -> None:
    """At the level of the config: what torch finds out with a dummy model has a test of its own."""
    if backend == "jax":
        from areal_x_jax.architecture import read_architecture as look
        from areal_x_jax.families import FAMILIES

        trained = {family.model_type for family in FAMILIES.values()}
    else:
        from areal_x_torch.loading import check_kind

        def look(config: dict[str, Any]) -> Any:
            check_kind(Path("here"), config)

        trained = {"gpt2", "qwen3", "llama", "olmo3", "mixtral", "qwen3_vl", "qwen2_5_vl", "qwen3_next", "qwen3_5"}
    found = refusals(look, of_language)
    assert not trained & found.keys()
    assert not [words for words in found.values() if "\n" in words or len(words) > 1000]
    wrong = {name: found[name] for name, part in PARTS.items() if name in found and part not in found[name]}
    assert not wrong


@pytest.mark.thorough
@pytest.mark.parametrize("of_backend", ["jax", "torch"])
def test_every_causal_model_of_transformers_can_be_trained_or_is_refused_in_a_sentence(of_backend: str, tmp_path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.families import tiny

    check, found = find_backend(of_backend).load().check, {}
    for model_type, name in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"mistral4": "Mistral4ForCausalLM"}).items():
        if model_type in UNMADE:
            continue
        directory = tmp_path / model_type
        try:
            config = tiny(model_type)
        except Exception:  # its parts' sizes go together in ways of their own
            continue
        config.architectures = [name]
        config.save_pretrained(directory)
        try:
            check(TrainerConfig(ModelConfig(str(directory))))
        except UserError as error:
            found[config.model_type] = str(error)  # of the decoder alone
    assert not [words for words in found.values() if "\n" in words]
    wrong = {name: found[name] for name, part in PARTS.items() if name in found and part not in found[name]}
    assert not wrong
    assert of_backend == "jax" or len(found) < len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) / 2


def test_a_model_of_the_hub_is_looked_at_as_it_is_trained_without_dropout(tmp_path: Path) -> None:
    from transformers import AutoConfig

    import areal_x_torch

    config = AutoConfig.for_model(**SIZES, model_type="gpt2", resid_pdrop=0.5, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    areal_x_torch.check(TrainerConfig(ModelConfig(str(tmp_path))))


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}, ("embeddings for each layer", "layers share")),
        ({"attention_k_eq_v": True, "global_head_dim": 16}, ("keys as values", "heads of other widths")),
        ({"enable_moe_block": True, "num_experts": 2}, ("experts beside each MLP",)),
    ],
)
def test_jax_names_what_a_model_has_that_it_does_not_know(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    from areal_x_jax.architecture import read_architecture

    with pytest.raises(UserError) as caught:
        read_architecture({**SIZES, "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], **changes})
    assert all(part in str(caught.value) for part in parts)
