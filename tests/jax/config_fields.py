"""Every field that transformers knows of each family's config, changed: do we compute the same, or refuse by name?

`python -m tests.jax.config_fields [FAMILY …]` compares log-probabilities of packed sequences, longer than any window, with
transformers' of each sequence alone, for every case: minutes. The tests take the cases' shapes, and the numbers of some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import CONFIG_MAPPING

from areal_x.errors import UserError
from areal_x.hf.model_dir import read_config, read_tensors
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.dense_attention import softcapped
from areal_x_jax.families import FAMILIES
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.weights import from_tensors
from tests.model_families import FAMILY_MODELS, INSIDE, MULTIMODAL_MODELS
from tests.models import (
    EXPERTS,
    GEMMA3,
    LINEAR,
    LLAMA3,
    QWEN3,
    SEEING,
    SIZES,
    log_softmax,
    seeing,
    sequences,
    torch_logits,
    write_config,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
WINDOW = {"sliding_window": 5, "use_sliding_window": True}
MIXTURE = {**EXPERTS, "num_experts": 4}
ARCHITECTURES = {family.model_type: name for name, family in FAMILIES.items()}
QWEN2_MOE = {**SIZES, **MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
QWEN3_MOE = {**QWEN3, **MIXTURE, "model_type": "qwen3_moe"}
# Two of a family: without a window, and with one where it can have any.
BASES: dict[str, list[dict[str, Any]]] = {
    "qwen3": [QWEN3, QWEN3 | WINDOW | {"max_window_layers": 1}],
    "qwen2": [b := {**SIZES, "model_type": "qwen2"}, b | WINDOW | {"max_window_layers": 1}],
    "qwen3_moe": [QWEN3_MOE, QWEN3_MOE | WINDOW | {"max_window_layers": 1}],
    "qwen2_moe": [QWEN2_MOE, QWEN2_MOE | WINDOW | {"max_window_layers": 1}],
    "llama": [{**SIZES, "model_type": "llama"}],
    "mistral": [b := {**SIZES, "model_type": "mistral", "sliding_window": None}, b | {"sliding_window": 5}],
    "gemma3_text": [GEMMA3 | {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 3}],
    "qwen2_5_vl": [
        seeing("qwen2_5_vl", TOWER | {"window_size": 16, "fullatt_block_indexes": [0]}, [2, 3, 3]),
        seeing(
            "qwen2_5_vl", TOWER | {"window_size": 16, "fullatt_block_indexes": [0]}, [2, 3, 3], **WINDOW, max_window_layers=1
        ),
    ],
    "qwen3_vl": [
        seeing("qwen3_vl", TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, [4, 2, 2], head_dim=16)
    ],
}
BASES |= {
    family: [shapes[0], shapes[-1]]
    for family, shapes in FAMILY_MODELS.items()
    if family not in BASES and family not in MULTIMODAL_MODELS
}
BASES["gemma3"] = [MULTIMODAL_MODELS["gemma3"][2]]  # one for all of them: the text inside is read as elsewhere
KINDS = ["sliding_attention", "full_attention", "full_attention"]
ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {**LINEAR, "rope_theta": 500.0},
    {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 500.0},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
    {**YARN, "mscale": 2.0},
    {**YARN, "factor": 1.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "longrope", **LONG, "rope_theta": 1e4},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4, "mystery": 2.0},
]
# Other values than the bases' and the defaults.
VALUES: dict[str, list[Any]] = {
    "vocab_size": [61],
    "hidden_size": [48],
    "intermediate_size": [56],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [8, 6],
    "num_key_value_heads": [1, 4],
    "head_dim": [8, 12],
    "hidden_act": ["gelu_pytorch_tanh", "gelu", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "max_position_embeddings": [64],
    "rms_norm_eps": [0.05],
    "layer_norm_eps": [0.05],
    "logit_scale": [2.0],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [2.0],
    "attention_multiplier": [2.0],
    "logits_scaling": [2.0],
    "intermediate_size_mlp": [40],
    "moe_layers": [[], [1, 2]],
    "interleave_moe_layer_step": [1, 3],
    "attention_chunk_size": [3, None],
    "attn_temperature_tuning": [False],
    "floor_scale": [2],
    "attn_scale": [0.7],
    "no_rope_layers": [[0, 1, 1, 0]],
    "no_rope_layer_interval": [2],
    "swiglu_alpha": [1.2],
    "swiglu_limit": [0.5],
    "use_qk_norm": [True, False],
    "tie_word_embeddings": [True, False],
    "rope_parameters": ROPES,
    "rope_scaling": [{key: x for key, x in rope.items() if key != "rope_theta"} for rope in ROPES],
    "rope_theta": [500.0],
    "rope_local_base_freq": [500.0],
    "partial_rotary_factor": [0.25, 0.5],
    "original_max_position_embeddings": [16],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "qkv_bias": [False],
    "use_sliding_window": [True, False],
    "sliding_window": [3, None, 0],
    "max_window_layers": [0, 2],
    "layer_types": [KINDS, KINDS[::-1], KINDS[:1] * 3, KINDS[1:2] * 3, ["chunked_attention"] * 3],
    "sliding_window_pattern": [2],
    "_sliding_window_pattern": [2],
    "query_pre_attn_scalar": [7],
    "final_logit_softcapping": [3.0],
    "attn_logit_softcapping": [3.0],
    "use_bidirectional_attention": [True, "all"],
    "global_head_dim": [24, 15],
    "num_global_key_value_heads": [4, 3],
    "attention_k_eq_v": [True, False],
    "num_kv_shared_layers": [0, 1, 5, 6],
    "use_double_wide_mlp": [True, False],
    "hidden_size_per_layer_input": [0, 12],
    "vocab_size_per_layer_input": [60, 40],
    "enable_moe_block": [True, False],
    "top_k_experts": [1, None],
    "decoder_sparse_step": [2, 3],
    "mlp_only_layers": [[0], [1], [0, 1, 2]],
    "moe_intermediate_size": [40],
    "num_experts": [6, 0, 1],
    "num_local_experts": [6],
    "num_experts_per_tok": [1, 3],
    "norm_topk_prob": [True, False],
    "shared_expert_intermediate_size": [24, 0],
    "n_routed_experts": [12, 0],
    "n_shared_experts": [3, 0],
    "n_group": [2, 3, None],
    "topk_group": [1, 4, 5],
    "topk_method": ["greedy", "noaux_tc"],
    "routed_scaling_factor": [0.7],
    "first_k_dense_replace": [0, 2, 9],
    "mlp_layer_types": [["sparse", "dense", "dense"], ["dense"] * 3],
    "moe_num_experts": [6],
    "moe_k": [1, 3],
    "moe_num_shared_experts": [1, 0],
    "moe_layer_start_index": [0, 2],
    "moe_layer_end_index": [1],
    "moe_layer_interval": [2],
    "moe_norm_min": [0.9],
    "use_bias": [True],
    "num_mtp_layers": [2, 0],
    "num_nextn_predict_layers": [2, 0],
    "kv_lora_rank": [20],
    "q_lora_rank": [20, None],
    "qk_nope_head_dim": [6],
    "qk_rope_head_dim": [8],
    "v_head_dim": [10],
    "rope_interleave": [True, False],
    "linear_conv_kernel_dim": [2, 5],
    "linear_key_head_dim": [16],
    "linear_value_head_dim": [4],
    "linear_num_key_heads": [1, 4, 3],
    "linear_num_value_heads": [2, 8],
    "quantization_config": [{"quant_method": "fp8"}],
    "attention_dropout": [0.5],
    "embd_pdrop": [0.5],
    "resid_pdrop": [0.5],
    "router_jitter_noise": [0.5],
    "initializer_range": [0.5],
    "embedding_initializer_range": [0.5],
    "use_cache": [False],
    "pad_token_id": [3],
    "bos_token_id": [3],
    "eos_token_id": [3],
    "pretraining_tp": [2],
    "output_router_logits": [True],
    "router_aux_loss_coef": [0.5],
    "image_token_id": [4],
    "video_token_id": [4],
    "vision_start_token_id": [4],
    "vision_end_token_id": [4],
}
# Of vision towers, with which the same images can be read.
VISION_VALUES: dict[str, list[Any]] = {
    "depth": [5],
    "hidden_size": [48],
    "hidden_act": ["gelu", "silu", "gelu_pytorch_tanh"],
    "intermediate_size": [56],
    "num_heads": [2],
    "tokens_per_second": [1],
    "window_size": [32],
    "fullatt_block_indexes": [[0, 2], []],
    "rope_parameters": [
        {"rope_type": "axial", "rope_theta": 100.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "axial", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    "num_position_embeddings": [25, 64],
    "deepstack_visual_indexes": [[1], [2, 0], []],
}
# What the host cuts images into, or what stands beside the decoder's width: numbers that go together.
OF_IMAGES = {"in_channels", "patch_size", "spatial_merge_size", "temporal_patch_size", "out_hidden_size", "initializer_range"}
# Which fields no number of an inference depends on.
WITHOUT_EFFECT = {
    *("embd_pdrop", "resid_pdrop", "router_jitter_noise"),
    *(
        "attention_dropout",
        "initializer_range",
        "embedding_initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "pretraining_tp",
    ),
    *("output_router_logits", "router_aux_loss_coef", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
}
NESTED = ("text_config", "vision_config")


def known_fields(family: str) -> set[str]:
    """Returns the fields of transformers' configuration class and of its text part, and the older names that it translates."""
    kind = CONFIG_MAPPING[INSIDE.get(family, family)]  # of a multimodal model, the part that is trained
    own = {field.name for kind in (kind, kind.sub_configs.get("text_config", kind)) for field in fields(kind)}
    general = {field.name for field in fields(kind.__mro__[1])} - {"tie_word_embeddings"}
    older = {"rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "quantization_config"}
    return (
        own - general - set(NESTED) | older | set(kind.attribute_map.values()) | {"layer_types", "head_dim", "sliding_window"}
    )


def cases(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a label of the change (family, number of the base, field, value) and the config with the change."""
    for number, base in enumerate(BASES[family]):
        base = {**deepcopy(base), "architectures": [ARCHITECTURES[family]]}
        of_gemma = {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"}
        extra = of_gemma if family.startswith("gemma3") else set()
        extra = {"global_head_dim", "num_global_key_value_heads"} if family.startswith("gemma4") else extra
        for name in sorted(known_fields(family) | extra):
            for value in deepcopy(VALUES[name]):  # transformers writes into some
                inside = "text_config" in base and name not in {f.name for f in fields(CONFIG_MAPPING[family])}
                text = deepcopy(base["text_config"] if inside else base)
                if isinstance(value, list) and name == "layer_types":
                    value = value[: text["num_hidden_layers"]]
                if name == "rope_parameters" and family.startswith("gemma") and "mystery" not in value:
                    value = {"full_attention": value, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
                if "mrope_section" in (text.get("rope_parameters") or {}):
                    value = (
                        {**value, "mrope_section": [2, 3, 3]} if name.startswith("rope_") and name != "rope_theta" else value
                    )
                    text = {**text, "rope_parameters": dict(text["rope_parameters"])}
                    if name in ("rope_scaling", "rope_theta"):  # the older spelling in place of the newer
                        del text["rope_parameters"]
                        text |= {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}
                text[name] = value
                yield f"{family} {number} {name} = {value!r}", {**base, "text_config": text} if inside else text


def vision_cases(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of the tower, and of how the decoder turns with images."""
    base = {**SEEING[family], "architectures": [ARCHITECTURES[family]]}
    known = {field.name for field in fields(CONFIG_MAPPING[family].sub_configs["vision_config"])}
    known -= {field.name for field in fields(CONFIG_MAPPING[family].__mro__[1])} | OF_IMAGES
    for name in sorted(known):
        for value in deepcopy(VISION_VALUES[name]):
            yield f"{family} images {name} = {value!r}", {**base, "vision_config": {**base["vision_config"], name: value}}
    rope = base["text_config"]["rope_parameters"]
    for change in ({"mrope_section": [4, 3, 1]}, {"mrope_interleaved": family != "qwen3_vl"}, {"rope_theta": 100.0}):
        text = {**base["text_config"], "rope_parameters": {**rope, **change}}
        yield f"{family} images rope_parameters = {change!r}", {**base, "text_config": text}


def packed_logprobs(arch: Architecture, directory: Path, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Returns our log-probabilities of sequences that are packed into one row."""
    params = from_tensors(arch, read_tensors(directory), str(directory))
    tokens = np.concatenate(rows)[None]
    ids = np.repeat(np.arange(1, len(rows) + 1), [len(row) for row in rows])[None]
    positions = np.concatenate([np.arange(len(row)) for row in rows])[None]
    with jax.disable_jit():  # cases are of many shapes: most of a compilation would be used once
        hidden, _ = hidden_states(arch, params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(ids))
        logits = np.asarray(softcapped(hidden @ head_kernel(params), arch.logit_softcap))[0]
    return np.split(log_softmax(logits), np.cumsum([len(row) for row in rows])[:-1])


def deviation(config: dict[str, Any], directory: Path, images: bool = False) -> float | str:
    """The largest difference of any log-probability from transformers' (of any logit beside images); or why we or transformers
    refuse the config."""
    try:
        arch = read_architecture(config)
    except UserError as error:
        return f"refused: {error}"
    rows = sequences(31, 17, 23, vocab=49)
    try:
        write_config({k: x for k, x in config.items() if k != "architectures"}, directory, "vision_config" in config)
        theirs = [log_softmax(x) for x in torch_logits(directory, rows)]
    except Exception as error:
        return f"transformers fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    assert read_architecture(read_config(directory)) == arch, "what transformers saves is read otherwise"
    if images:
        from .test_images import image_logit_deviation

        return image_logit_deviation(directory, image_like=True)
    return max(float(np.abs(a - b).max()) for a, b in zip(packed_logprobs(arch, directory, rows), theirs, strict=True))


def main(families: list[str]) -> None:
    wrong = total = refused = unknown = 0
    for family in families or BASES:
        for words, config in chain(cases(family), vision_cases(family) if family in SEEING else ()):
            with TemporaryDirectory() as directory:
                try:
                    found = deviation(config, Path(directory), " images " in words)
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error)[:150]}"
            total += 1
            refused += isinstance(found, str) and found.startswith("refused")
            unknown += isinstance(found, str) and found.startswith("transformers fails")
            fine = found < 1e-4 if isinstance(found, float) else found.startswith(("refused", "transformers fails"))
            wrong += not fine
            print("ok   " if fine else "WRONG", words, "→", f"{found:.1e}" if isinstance(found, float) else found, flush=True)
    print(f"{total} cases, {refused} refused by name, {unknown} that transformers cannot compute, {wrong} wrong")


if __name__ == "__main__":
    main(sys.argv[1:])
