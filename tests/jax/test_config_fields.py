"""Every field of config.json that transformers reads is honoured or refused by name, in every family."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from areal_x.errors import UserError
from areal_x_jax.architecture import read_architecture
from areal_x_jax.families import FAMILIES
from tests.model_families import NEEDED
from tests.models import GEMMA3, MORE, QWEN3, SEEING, SIZES
from tests.thorough import further

from .config_fields import (
    ARCHITECTURES,
    BASES,
    QWEN2_MOE,
    QWEN3_MOE,
    VALUES,
    WINDOW,
    WITHOUT_EFFECT,
    YARN,
    cases,
    deviation,
    known_fields,
    vision_cases,
)

# What transformers' own models of a family leave out, so that there is nothing to do.
IGNORED = {
    *(f"{family} original_max_position_embeddings" for family in BASES),  # with a rotation that is not stretched
    "gemma3_text rope_scaling",
    "gemma3 rope_scaling",
    "qwen3_moe max_window_layers",
    "qwen3_vl num_local_experts",
    # beside rope_parameters, which has its own
    *(f"{family} rope_theta" for family in ("gpt_oss", "gemma4_text", "gemma4_unified_text")),
}
# What was computed wrongly once, and its siblings.
CHANGES: dict[str, dict[str, Any]] = {
    "a mixture with windows in every other layer": QWEN2_MOE | WINDOW | {"max_window_layers": 2, "num_hidden_layers": 3},
    "a mixture with windows in listed layers": QWEN2_MOE | WINDOW | {"layer_types": ["full_attention", "sliding_attention"]},
    "a mixture with windows in all layers": QWEN3_MOE | WINDOW | {"max_window_layers": 1},
    "windows in the first layers": QWEN3 | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "yarn that is not truncated": QWEN3 | {"rope_parameters": {**YARN, "truncate": False}},
    "yarn as DeepSeek scales it": QWEN3 | {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
    "mistral as its successor": {
        **SIZES,
        "model_type": "mistral",
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma's two rotations": GEMMA3 | {"sliding_window": 5, "rope_theta": 500.0, "rope_local_base_freq": 100.0},
    "dense layers between": MORE["qwen2-moe-between"] | WINDOW | {"max_window_layers": 3},
}


def with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "architectures": [ARCHITECTURES[str(config["model_type"])]]}


@pytest.mark.parametrize("name", [*list(CHANGES)[1:], *further(next(iter(CHANGES)))])
def test_packed_sequences_longer_than_any_window_have_transformers_numbers(name: str, tmp_path: Path) -> None:
    found = deviation(with_architecture(CHANGES[name]), tmp_path)
    assert isinstance(found, float), found
    assert found < 1e-4


@pytest.mark.parametrize("family", BASES)
def test_every_field_changes_what_is_computed_or_is_refused_by_name(family: str) -> None:
    """That it changes to the right numbers shows `python -m tests.jax.config_fields`."""
    without_effect = {name for name in known_fields(family) if name not in WITHOUT_EFFECT and f"{family} {name}" not in IGNORED}
    bases = [read_architecture(with_architecture(base)) for base in BASES[family]]
    for words, changed in cases(family):
        if words.split()[2] not in without_effect:
            continue
        try:
            if read_architecture(changed) != bases[int(words.split()[1])]:
                without_effect.discard(words.split()[2])
        except UserError:
            without_effect.discard(words.split()[2])
    assert without_effect == set()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_every_field_of_a_tower_changes_what_is_computed_or_is_refused_by_name(family: str) -> None:
    base, without_effect = read_architecture({**SEEING[family], "architectures": [ARCHITECTURES[family]]}), set()
    for words, changed in vision_cases(family):
        try:
            effect = read_architecture(changed) != base
        except UserError:
            effect = True
        without_effect |= set() if effect else {words.split()[2]}
    # Of videos; and each tower's own activation.
    assert without_effect - {"tokens_per_second"} == {"hidden_act"}


@pytest.mark.parametrize("family", BASES)
def test_no_field_that_transformers_models_read_is_left_out(family: str) -> None:
    module = import_module(f"transformers.models.{family.removesuffix('_text')}.modeling_{family.removesuffix('_text')}")
    read = set(re.findall(r"\bconfig\.([a-z]\w*)|getattr\((?:self\.)?config, \"(\w+)\"", getsource(module)))
    read = {one or other for one, other in read}
    whole = CONFIG_MAPPING[family.removesuffix("_text")]  # a text model's module has the tower's classes too
    towers = [whole.sub_configs.get(f"{part}_config") for part in ("vision", "audio")]
    beside = [*towers, whole if family.endswith("_text") else None]
    others = {field.name for kind in beside if kind for field in fields(kind)}
    if family == "solar_open":
        others |= {"intermediate_size"}  # of a dense MLP, which none of its layers has
    of_class = {
        "get_text_config",
        "per_layer_config",
        "standardize_rope_params",
        "text_config",
        "vision_config",
        "audio_config",
        "mm_tokens_per_image",
        "image_token_id",
    }
    of_class |= {"output_attentions", "output_hidden_states", "return_dict", "problem_type", "num_labels"}
    named_anew = set(CONFIG_MAPPING[family].attribute_map)  # other names of known fields
    assert read - others - of_class - known_fields(family) - named_anew == set()


@pytest.mark.parametrize("family", BASES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    kind = CONFIG_MAPPING[family]
    least = {"model_type": family, "architectures": [ARCHITECTURES[family]], **NEEDED.get(family, {})}
    whole = kind(**NEEDED.get(family, {})).to_dict()
    assert read_architecture(least) == read_architecture({**whole, "architectures": least["architectures"]})
    text = kind().get_text_config()
    arch = read_architecture(least)
    eps = text.layer_norm_eps if arch.centred else text.rms_norm_eps
    assert (arch.eps, arch.layers, arch.kv_heads) == (eps, text.num_hidden_layers, text.num_key_value_heads)


def test_windows_that_a_config_leaves_out_are_transformers() -> None:
    gemma = read_architecture(with_architecture({key: x for key, x in GEMMA3.items() if key != "head_dim"}))
    assert gemma.windows == (4096,) * 4
    assert gemma.head_dim == 256
    mistral = with_architecture({**SIZES, "model_type": "mistral"})
    assert read_architecture(mistral).windows == (4096, 4096)
    assert read_architecture(mistral | {"sliding_window": None}).windows == (0, 0)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"},
            "does not know the architecture Gemma3nForConditionalGeneration",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "vision_config": {}}, "does not support Gemma3ForCausalLM with images"),
        ({"architectures": ["Qwen3ForConditionalGeneration"]}, "trains Qwen3ForCausalLM"),
        ({"model_type": "llama"}, "config.json has model_type = 'llama', but .* Qwen3ForCausalLM needs 'qwen3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, r"transformers cannot read the model's config.json \(.*num_hidden_layers"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "rope scaling 'longrope'"),
    ],
)
def test_what_a_family_has_not_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_architecture(with_architecture(QWEN3) | change)


def test_every_family_is_here() -> None:
    assert set(ARCHITECTURES.values()) == set(FAMILIES)
    assert {name for family in BASES for name in known_fields(family)} <= set(VALUES)
