"""Shapes of tiny models of each family that the JAX backend has a description of: what the tests of families run, and what
docs/models.md lists."""

from __future__ import annotations

from typing import Any

from tests.models import (
    DELTA,
    EXPERTS,
    FULL,
    GEMMA3,
    GEMMA4,
    IDS,
    KEYS_AS_VALUES,
    LATENT_WIDTHS,
    LLAMA3,
    LLAMA4,
    NEAR,
    QWEN3,
    RULE,
    SEEING_HYBRIDS,
    SHARED_KEYS,
    SHARING,
    SIX,
    SIZES,
    TOWER3_5,
    UNIFIED,
    YARN,
)

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ONE_KEY, ALL_KEYS = {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
MIXED = ["sliding_attention", "full_attention", "full_attention"]
YARN_OSS = {**YARN, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
EIGHT = {"num_local_experts": 4, "num_experts_per_tok": 2}
PHI3 = {**SIZES, "model_type": "phi3", "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1}
GPT_OSS = {**SIZES, **EIGHT, "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 5, "rope_parameters": YARN_OSS}
COHERE = {**SIZES, "bos_token_id": 1, "eos_token_id": 1, "logit_scale": 0.25}
COHERE2 = {**COHERE, "model_type": "cohere2", "sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 2}
GLM = {**SIZES, "pad_token_id": None, "eos_token_id": 1, "head_dim": 8}
GRANITE = {
    **SIZES,
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
    "logits_scaling": 4.0,
}
OLMO = {**SIZES, "pad_token_id": None, "eos_token_id": 1}
OLMO3 = {**OLMO, "model_type": "olmo3", "sliding_window": 5, "num_hidden_layers": 3, "layer_types": MIXED}
SMOLLM3 = {**SIZES, "model_type": "smollm3", "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1}
MIXTRAL = {**SIZES, **EIGHT, "model_type": "mixtral"}
LISTED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED, "num_hidden_layers": 3}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
# One dense layer before those with experts, and none.
THREE = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
SPARSE = {"num_hidden_layers": 2, "first_k_dense_replace": 0}
LATENT = {**SIZES, **LATENT_WIDTHS, **ALL_KEYS, "bos_token_id": 1, "eos_token_id": 1}
YARN_LATENT = {**YARN, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.3}
DEEPSEEK2 = {**LATENT, **ROUTED, **THREE, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
DEEPSEEK3 = {**LATENT, **ROUTED, **THREE, "model_type": "deepseek_v3"}
GLM_MOE = {**SIZES, **ROUTED, **THREE, "model_type": "glm4_moe", "head_dim": 8}
GLM_LITE = {**LATENT, **ROUTED, "num_hidden_layers": 3, "model_type": "glm4_moe_lite"}
DOTS = {**QWEN3, **ROUTED, **THREE, "model_type": "dots1"}
SOLAR = {**QWEN3, **ROUTED, "model_type": "solar_open"}
YOUTU = {**LATENT, **UNTIED, "model_type": "youtu"}
ERNIE = {**SIZES, **UNTIED, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}

AT_ONCE = {"low_freq_factor": 1.0, "high_freq_factor": 1.0}  # as Scout's: no frequencies in between

# As in 26B-A4B: experts beside each MLP. Both it and 31B have keys that are values in full layers.
BESIDE_MLP = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
ROTATIONS = {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
ROTATIONS |= {"full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0}}

# Model type → its shapes: heads tied or not, keys for one query head or several, windows or none, biases, scaled positions.
FAMILY_MODELS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [b := {**SIZES, "model_type": "qwen2"}, b | TIED | ALL_KEYS, b | LISTED | ONE_KEY, b | {"rope_scaling": YARN}],
    "qwen3": [QWEN3, QWEN3 | TIED | ONE_KEY, QWEN3 | LISTED, QWEN3 | {"attention_bias": True, **ALL_KEYS}],
    "qwen2_moe": [
        b := {**SIZES, **EXPERTS, "model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 40},
        b | TIED | ALL_KEYS,
        b | {"num_hidden_layers": 3, "mlp_only_layers": [1], "qkv_bias": False},
        b | {"norm_topk_prob": True, **ONE_KEY},
    ],
    "qwen3_moe": [
        b := {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True},
        b | TIED | ONE_KEY,
        b | {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        b | {"norm_topk_prob": False, "attention_bias": True},
    ],
    "llama": [
        b := {**SIZES, "model_type": "llama"},
        b | TIED | ONE_KEY,
        b | {"attention_bias": True, "mlp_bias": True},
        b | {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}, **ALL_KEYS},
    ],
    "mistral": [
        b := {**SIZES, "model_type": "mistral", "sliding_window": None},
        b | TIED | ALL_KEYS,
        b | {"sliding_window": 6, "head_dim": 16, **ONE_KEY},
        b | {"sliding_window": 5, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    ],
    "mixtral": [MIXTRAL, MIXTRAL | TIED | ONE_KEY, MIXTRAL | {"sliding_window": 6}, MIXTRAL | {"head_dim": 16, **ALL_KEYS}],
    "gemma3_text": [
        GEMMA3 | {"sliding_window": 5, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
        GEMMA3 | {"sliding_window": 7, "attention_bias": True, **ALL_KEYS},
        GEMMA3 | {"sliding_window": 5, "sliding_window_pattern": 2, **UNTIED},
        GEMMA3 | {"sliding_window": 5, **ONE_KEY},
    ],
    "gemma4_text": [
        GEMMA4 | SHARED_KEYS | {"use_double_wide_mlp": True},
        GEMMA4 | ALL_KEYS | KEYS_AS_VALUES | BESIDE_MLP | {"num_global_key_value_heads": 2},
        GEMMA4 | KEYS_AS_VALUES | UNTIED | SIX | {"final_logit_softcapping": None, "rope_parameters": ROTATIONS},
        GEMMA4
        | SHARED_KEYS
        | ONE_KEY
        | {"num_kv_shared_layers": 2, "layer_types": ["full_attention", NEAR, NEAR, NEAR, NEAR, "full_attention"]},
        GEMMA4
        | KEYS_AS_VALUES
        | BESIDE_MLP
        | SHARED_KEYS
        | {"use_double_wide_mlp": True, "attention_bias": True, "num_experts": 6, "top_k_experts": 3},
    ],
    "gemma4_unified_text": [
        UNIFIED | KEYS_AS_VALUES,
        UNIFIED | UNTIED | ONE_KEY | {"final_logit_softcapping": 3.0, "attention_bias": True},
        UNIFIED | SIX | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        UNIFIED | {"rope_parameters": ROTATIONS, "num_kv_shared_layers": 2},
    ],
    "gpt_oss": [
        GPT_OSS,
        GPT_OSS | TIED | ONE_KEY | {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        GPT_OSS | ALL_KEYS | {"attention_bias": False, "layer_types": ["full_attention"] * 2},
        GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.2, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
    ],
    "olmo2": [
        b := {**OLMO, "model_type": "olmo2"},
        b | TIED | ALL_KEYS,
        b | {"attention_bias": True, **ONE_KEY},
        b | {"rope_parameters": {**YARN, "rope_theta": 1e4}},
    ],
    "olmo3": [
        OLMO3,
        OLMO3 | TIED | ALL_KEYS | {"layer_types": MIXED[::-1]},
        OLMO3 | {"attention_bias": True, **ONE_KEY},
        OLMO3 | {"rope_scaling": {k: x for k, x in YARN_OSS.items() if k not in ("rope_theta", "truncate")}},
    ],
    "smollm3": [
        SMOLLM3 | {"num_hidden_layers": 4},
        SMOLLM3 | UNTIED | ONE_KEY | {"no_rope_layers": [0, 1]},
        SMOLLM3 | {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2},
        SMOLLM3 | LISTED | ALL_KEYS | {"no_rope_layers": [1, 0, 1]},
    ],
    "granite": [
        GRANITE,
        GRANITE | TIED | ONE_KEY,
        GRANITE | {"attention_bias": True, "mlp_bias": True, "logits_scaling": 0.3},
        GRANITE | {"rope_parameters": {**YARN, "rope_theta": 1e4}, **ALL_KEYS},
    ],
    "cohere": [
        b := {**COHERE, "model_type": "cohere"},
        b | UNTIED | ONE_KEY,
        b | {"attention_bias": True, "logit_scale": 2.0},
        b | {"rope_parameters": {**YARN, "rope_theta": 1e4}, **ALL_KEYS},
    ],
    "cohere2": [
        COHERE2,
        COHERE2 | UNTIED | ONE_KEY | {"num_hidden_layers": 2},
        COHERE2 | {"attention_bias": True, "layer_types": MIXED, "logit_scale": 2.0},
        COHERE2 | ALL_KEYS | {"layer_types": ["full_attention"] * 3},
    ],
    "phi3": [
        PHI3,
        PHI3 | TIED | ONE_KEY,
        PHI3 | {"sliding_window": 5, **ALL_KEYS},
        PHI3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    "glm": [
        b := {**GLM, "model_type": "glm"},
        b | TIED | ONE_KEY,
        b | {"attention_bias": False, "head_dim": 16, **ALL_KEYS},
        b | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
    "glm4": [
        b := {**GLM, "model_type": "glm4"},
        b | TIED | ONE_KEY,
        b | {"attention_bias": False, "head_dim": 16, **ALL_KEYS},
        b | {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    "deepseek_v2": [
        DEEPSEEK2 | {"routed_scaling_factor": 1.5},
        DEEPSEEK2 | TIED | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
        DEEPSEEK2 | SPARSE | {"attention_bias": True, "mlp_bias": True},
        DEEPSEEK2 | {"rope_parameters": YARN_LATENT},
    ],
    "deepseek_v3": [
        DEEPSEEK3,
        DEEPSEEK3 | TIED | ONE_GROUP | {"q_lora_rank": None, "routed_scaling_factor": 2.446},
        DEEPSEEK3 | SPARSE | {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
        DEEPSEEK3 | {"rope_parameters": YARN_LATENT, "v_head_dim": 16},
    ],
    "glm4_moe": [
        GLM_MOE | {"routed_scaling_factor": 1.7, "use_qk_norm": True},
        GLM_MOE | TIED | ONE_KEY | ONE_GROUP,
        GLM_MOE | SPARSE | {"attention_bias": True, "head_dim": 16, "norm_topk_prob": False},
        GLM_MOE | ALL_KEYS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
    "glm4_moe_lite": [
        GLM_LITE,
        GLM_LITE | TIED | ONE_GROUP | {"q_lora_rank": None},
        GLM_LITE | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
        GLM_LITE | {"rope_interleave": False, "rope_parameters": YARN_LATENT},
    ],
    "dots1": [
        DOTS | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        DOTS | TIED | ONE_KEY | ONE_GROUP,
        DOTS | SPARSE | ALL_KEYS | {"head_dim": 8},
        DOTS | {"attention_bias": True, "sliding_window": 5, "layer_types": MIXED},
    ],
    "solar_open": [
        SOLAR,
        SOLAR | TIED | ONE_KEY | ONE_GROUP,
        SOLAR | {"attention_bias": True, "norm_topk_prob": False, "head_dim": 8},
        SOLAR | ALL_KEYS | {"rope_parameters": {**YARN, "rope_theta": 1e4}, "routed_scaling_factor": 1.7},
    ],
    "llama4_text": [
        LLAMA4,
        LLAMA4 | TIED | ONE_KEY | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "num_hidden_layers": 2},
        LLAMA4 | ALL_KEYS | {"attention_bias": True, "no_rope_layer_interval": 2, "attn_scale": 0.5, "use_qk_norm": False},
        LLAMA4
        | {"attn_temperature_tuning": False, "moe_layers": [0], "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
        | {"rope_parameters": {**LLAMA3, **AT_ONCE, "rope_theta": 1e4, "original_max_position_embeddings": 16}},
    ],
    "youtu": [
        YOUTU,
        YOUTU | TIED | {"q_lora_rank": None},
        YOUTU | {"attention_bias": True, "rope_interleave": False, "v_head_dim": 16},
        YOUTU | {"rope_parameters": YARN_LATENT},
    ],
    "ernie4_5_moe": [
        ERNIE | {"num_hidden_layers": 3},
        ERNIE | TIED | ONE_KEY | {"moe_num_shared_experts": 0},
        ERNIE | {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 1},
        ERNIE | ALL_KEYS | {"num_hidden_layers": 3, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "head_dim": 16},
    ],
}
# Fields that a config of a family must have: transformers has no default for them, or one that makes no model.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
}
# The same of families with gated delta rule layers: heads, widths of the convolution, layers in other orders, mixtures.
DEEP = {**DELTA, "head_dim": 16, "num_hidden_layers": 4}
HALF_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
QWEN3_NEXT = {**SIZES, **DEEP, **SHARING, "model_type": "qwen3_next"}
QWEN3_5 = {**SIZES, **DEEP, "model_type": "qwen3_5_text"}
NO_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
QWEN3_5_MOE = {**NO_MLP, **DEEP, **SHARING, "model_type": "qwen3_5_moe_text"}
HYBRID_MODELS: dict[str, list[dict[str, Any]]] = {
    "qwen3_next": [
        QWEN3_NEXT,
        QWEN3_NEXT | TIED | ONE_KEY | HALF_TURNED | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
        QWEN3_NEXT | {"mlp_only_layers": [1], "attention_bias": True, "layer_types": [FULL, RULE, RULE, FULL]},
        QWEN3_NEXT
        | {"num_hidden_layers": 3, "layer_types": [RULE, FULL, RULE], "linear_num_key_heads": 1, "norm_topk_prob": False},
    ],
    "qwen3_5_text": [
        QWEN3_5,
        QWEN3_5 | TIED | ONE_KEY | HALF_TURNED | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        QWEN3_5 | {"attention_bias": True, "num_hidden_layers": 3, "layer_types": [RULE, RULE, FULL], **ALL_KEYS},
        QWEN3_5 | {"linear_key_head_dim": 16, "linear_value_head_dim": 4, "full_attention_interval": 2},
    ],
    "qwen3_5_moe_text": [
        QWEN3_5_MOE,
        QWEN3_5_MOE | TIED | ONE_KEY | {"num_experts": 6, "num_experts_per_tok": 3, "linear_num_value_heads": 6},
        QWEN3_5_MOE | HALF_TURNED | {"num_hidden_layers": 2, "layer_types": [RULE, FULL], "linear_conv_kernel_dim": 2},
        QWEN3_5_MOE | {"attention_bias": True, "linear_num_key_heads": 4, "layer_types": [FULL, RULE, FULL, RULE]},
    ],
}
# Multimodal checkpoints of which text is trained: the shapes of their language models, each beside the same tower.
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"image_size": 16, "patch_size": 4}
LLAMA4_TOWER = {**SIGLIP, "intermediate_size": 64, "vision_output_dim": 16}
LLAMA4_TOWER |= {"projector_input_dim": 16, "projector_output_dim": 16}
GEMMA4_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
GEMMA4_TOWER |= {"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64}
BESIDE: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {"vision_config": GEMMA4_TOWER},
    "gemma4_unified": {"vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}},
    "llama4": {"vision_config": LLAMA4_TOWER},
    "mistral3": {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 8}, "image_token_index": 99},
    "qwen3_5": {"vision_config": TOWER3_5, **IDS},
    "qwen3_5_moe": {"vision_config": TOWER3_5, **IDS},
}
INSIDE = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text", "mistral3": "mistral"}
INSIDE |= {"gemma4_unified": "gemma4_unified_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def multimodal(family: str, text: dict[str, Any]) -> dict[str, Any]:
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", family.startswith("gemma"))}
    if family == "gemma3":  # transformers leaves the cap out beside a tower
        text = {name: x for name, x in text.items() if name != "final_logit_softcapping"}
    text = text | tied
    return {**BESIDE[family], **tied, "model_type": family, "text_config": text}


MULTIMODAL_MODELS = {
    family: [multimodal(family, shape) for shape in (FAMILY_MODELS | HYBRID_MODELS)[inside]]
    for family, inside in INSIDE.items()
}
FAMILY_MODELS |= HYBRID_MODELS | MULTIMODAL_MODELS
CASES = {f"{family}-{number}": config for family, shapes in FAMILY_MODELS.items() for number, config in enumerate(shapes)}
HYBRIDS = [name for name in CASES if name.startswith(("qwen3_next", "qwen3_5"))]

# ---- docs/models.md

# Model type → the models that it names.
TITLES = {
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "llama": "Llama 2, 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "gemma3_text": "Gemma 3, text",
    "gpt_oss": "gpt-oss",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "phi3": "Phi-3, Phi-4",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4 0414",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm4_moe_lite": "GLM-4.7 Flash",
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "DeepSeek-V3, R1, Moonlight",
    "dots1": "dots.llm1",
    "solar_open": "Solar Open",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "youtu": "Youtu-LLM",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, text",
    "qwen3_5_moe_text": "Qwen3.5 MoE, text",
    "gemma3": "Gemma 3",
    "gemma4_text": "Gemma 4, text",
    "gemma4": "Gemma 4",
    "gemma4_unified_text": "Gemma 4 12B, text",
    "gemma4_unified": "Gemma 4 12B",
    "llama4_text": "Llama 4, text",
    "llama4": "Llama 4",
    "mistral3": "Mistral Small 3.1, 3.2",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 MoE",
}
COLUMNS = ("full", "LoRA", "tensor", "expert", "context", "stage", "packed", "images")
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1")
MIXTURES += ("llama4_text", "llama4", "ernie4_5_moe", "solar_open", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
SEE = ("qwen2_5_vl", "qwen3_vl")
OF_SHAPES = {family: f"{family}-0" for family in FAMILY_MODELS}
OF_BOTH = {family: f"{family}_vl" for family in ("gemma3", "mistral3", "gemma4", "gemma4_unified", "llama4")}
OF_IMAGES = {family: family for family in SEE} | OF_BOTH
TORCH_SEES = {family: family for family in (*SEE, *SEEING_HYBRIDS)} | OF_BOTH
JAX, TORCH = "tests/jax/test_{}.py::test_{}", "tests/torch/test_{}.py::test_{}"
JAX_MESHES = JAX.format("families", "meshes_compute_the_numbers_of_one_device")
JAX_STAGES = JAX.format("sharding", "ten_updates_are_the_same_on_every_mesh_with_a_rest_on_the_host_in_between")
TORCH_STAGES = TORCH.format("pipeline", "stages_one_after_another_compute_what_the_whole_model_does_and_its_gradient")
TORCH_MESHES = TORCH.format("processes", "several_processes_learn_what_one_does")
TORCH_PAIRS = TORCH.format("family_meshes", "two_processes_train_each_family_as_one_does")
JAX_PACKED = (
    "families",
    "packed_rows_are_each_sequence_alone_in_transformers_and_files_go_round_with_the_same_bits",
)
TORCH_IMAGES = TORCH.format("images", "a_packed_row_gives_what_transformers_gives_for_each_sequence_alone")
# Backend, column → tests that prove it: family → the case that does.
PROOFS: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("JAX", "full"): {
        JAX.format("families", "gradients_are_those_of_transformers"): OF_SHAPES,
        JAX.format("images", "gradients_are_those_of_transformers_the_towers_too"): OF_IMAGES,
    },
    ("JAX", "LoRA"): {JAX.format("families", "adapters_of_every_kernel_are_transformers_with_their_products_added"): OF_SHAPES},
    ("JAX", "tensor"): {JAX_MESHES: OF_SHAPES},
    ("JAX", "expert"): {JAX_MESHES: {family: f"{family}-0" for family in MIXTURES} | {"gemma4_text": "gemma4_text-1"}},
    ("JAX", "context"): {JAX_MESHES: OF_SHAPES},
    ("JAX", "stage"): {
        JAX_STAGES: {"qwen3": "even", "qwen3_moe": "even-moe", "gemma3_text": "even-gemma3", "deepseek_v3": "even-latent"}
        | {"gemma4_text": "even-gemma4"}
    },
    ("JAX", "packed"): {
        JAX.format(*JAX_PACKED): OF_SHAPES,
        JAX.format("images", "logits_of_packed_rows_are_those_of_transformers"): OF_IMAGES,
    },
    ("JAX", "images"): {JAX.format("images", "logits_of_packed_rows_are_those_of_transformers"): OF_IMAGES},
    ("torch", "full"): {
        TORCH.format("families", "what_is_saved_after_a_step_says_the_same_in_transformers"): OF_SHAPES,
        TORCH.format("images", "gradients_are_those_of_each_sequence_alone"): TORCH_SEES,
    },
    ("torch", "LoRA"): {
        TORCH.format("lora", "adapters_of_each_family_are_transformers_with_the_products_added"): OF_SHAPES
        | {"qwen3_vl": "qwen3_vl"},
        TORCH_MESHES: {"qwen2_5_vl": "adapters-both"},
    },
    ("torch", "tensor"): {
        TORCH_PAIRS: {family: family for family in OF_SHAPES},
        TORCH_MESHES: {"qwen2_5_vl": "adapters-both", "qwen3_vl": "images-tensor"},
    },
    ("torch", "expert"): {TORCH_PAIRS: {family: family for family in MIXTURES} | {"gemma4_text": "gemma4_text-1"}},
    ("torch", "context"): {TORCH_PAIRS: {family: family for family in OF_SHAPES if family not in SEEING_HYBRIDS}},
    ("torch", "stage"): {
        TORCH_STAGES: {family: x for family, x in OF_SHAPES.items() if family not in INSIDE and family != "llama4_text"}
        | {"gemma4_text": "gemma4_text-1"}
    },
    ("torch", "packed"): {
        TORCH.format("families", "one_flat_row_gives_what_transformers_gives_for_each_sequence_alone_and_padded"): OF_SHAPES,
        TORCH_IMAGES: TORCH_SEES,
    },
    ("torch", "images"): {TORCH_IMAGES: TORCH_SEES},
}

VLLM = "tests/engines/vllm/test_vllm_{}.py::test_after_a_swap_a_family_says_{}"
ON_VLLM = ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "llama", "mistral", "mixtral", "olmo2", "olmo3", "smollm3", "granite")
ON_VLLM += ("phi3", "glm", "glm4", "glm4_moe", "dots1", "solar_open", "gemma4_text")
VLLM_IMAGES = "tests/engines/vllm/test_vllm_image_families.py::"
VLLM_IMAGES += "test_a_server_says_of_images_what_the_trainer_does_before_and_after_swaps_of_its_tower_too"
IMAGES_ON_VLLM = {family: f"{family}_vl" for family in ("mistral3", "gemma4", "llama4")}
IMAGES_ON_VLLM |= {"gemma4_unified": "gemma4_unified_vl-causal"} | {family: family for family in ("qwen2_5_vl", "qwen3_vl")}
ON_VLLM_IN_HALF = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
ON_SGLANG = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral", "gemma3_text", "olmo2", "granite", "phi3", "glm4")
# Engine → tests in which a real one, on a CPU, computes what transformers does, before and after a swap: family → the case.
SERVED: dict[str, dict[str, dict[str, str]]] = {
    "vLLM": {
        VLLM.format("families", "and_proves_what_the_new_weights_are_and_no_part_of_them_can_be_left_out"): {
            **{family: family for family in ON_VLLM},
            "qwen2_moe": "qwen2-moe",
            "qwen3_moe": "qwen3-moe",
            "gemma3_text": "gemma3",
        },
        VLLM.format("half_families", "what_an_engine_does_that_began_with_the_new_weights"): {
            family: family for family in ON_VLLM_IN_HALF
        },
        VLLM_IMAGES: {family: case for family, case in IMAGES_ON_VLLM.items() if family not in (*SEE, "llama4")},
    },
    "vLLM, images": {VLLM_IMAGES: IMAGES_ON_VLLM},
    "SGLang": {
        "tests/engines/sglang/test_sglang_families.py::test_after_a_swap_a_family_says_and_proves_what_the_new_weights_are": {
            family: family for family in ON_SGLANG
        },
    },
}


def is_served(family: str, engine: str) -> bool:
    return any(family in cases for cases in SERVED[engine].values())


def is_proven(family: str, backend: str, column: str) -> bool:
    return any(family in cases for cases in PROOFS[backend, column].values())
