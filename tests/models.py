"""Random models of each architecture that the backends train, and sequences for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.hf import image_format
from areal_x.hf.model_dir import read_config
from areal_x.types import Images, Trajectory

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN3 = {**SIZES, "model_type": "qwen3", "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Gated delta rule layers, and a mixture with an expert beside those that are chosen.
RULE, FULL = "linear_attention", "full_attention"
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
SHARING = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {**SIZES, "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 4}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA4 = {**SIZES, "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 56, "num_local_experts": 4}
LLAMA4 |= {"num_hidden_layers": 4, "attention_chunk_size": 5, "floor_scale": 4, "interleave_moe_layer_step": 2}
GEMMA4 = {**SIZES, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "bos_token_id": 1, "eos_token_id": 1, "num_hidden_layers": 4}
NEAR = "sliding_attention"
GEMMA4 |= {"layer_types": [NEAR, "full_attention"] * 2, "final_logit_softcapping": 4.0}
# As in E2B and E4B: embeddings for each layer, and the keys of the last layers are those of earlier ones.
OF_LAYERS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50}
SIX = {"num_hidden_layers": 6, "layer_types": [NEAR, NEAR, "full_attention"] * 2}
SHARED_KEYS = {**OF_LAYERS, **SIX, "num_kv_shared_layers": 3}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
UNIFIED = {name: x for name, x in GEMMA4.items() if "per_layer" not in name} | {"model_type": "gemma4_unified_text"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Of latent attention: those of queries and keys, values, and the vectors that they come from, all unlike.
LATENT_WIDTHS = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS = {
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {**SIZES, "model_type": "qwen2", "rope_theta": 1e6},
    "llama": {**SIZES, "model_type": "llama", "rope_theta": 5e5},
}
# The features that the first four lack, for what is cheap enough to be tested with all.
MORE = {
    "qwen2-window": {**SIZES, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2-tied-yarn": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen2-moe": {
        **SIZES,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 4,
    },
    "qwen3-biased": {**QWEN3, "attention_bias": True, "num_key_value_heads": 4},
    "qwen3-moe": {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True},
    "qwen3-moe-tied": {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "tie_word_embeddings": True},
    "qwen2-moe-between": {
        **SIZES,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_hidden_layers": 5,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0, 3],
        "qkv_bias": False,
    },
    "qwen3-moe-between": {
        **QWEN3,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "llama3": {
        **SIZES,
        "model_type": "llama",
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-tied": {
        **SIZES,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": None},
    "mistral-window": {**SIZES, "model_type": "mistral", "sliding_window": 6, "head_dim": 16, "num_key_value_heads": 1},
    "gemma3": {**GEMMA3, "sliding_window": 5, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
    "gemma3-biased": {**GEMMA3, "sliding_window": 7, "attention_bias": True, "num_hidden_layers": 7, "num_key_value_heads": 4},
}
# Models that see. Windows are of 4×4 patches.
IMAGE, VISION_START, VISION_END = 5, 7, 8
TEXT = {**SIZES, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
TOWER = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
TOWER2_5 = {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
TOWER3 = {**TOWER, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
TOWER3_5 = {**TOWER, "num_position_embeddings": 49}
IDS = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}


def seeing(family: str, tower: dict[str, Any], sections: list[int], tied: bool = False, **text: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections} | text.pop("rope", {})
    text = TEXT | {"rope_parameters": rope, "tie_word_embeddings": tied} | text
    return {"model_type": family, "text_config": text, "vision_config": tower, "tie_word_embeddings": tied, **IDS}


SEEING = {
    "qwen2_5_vl": seeing("qwen2_5_vl", TOWER2_5, [2, 3, 3]),
    "qwen2_5_vl-tied": seeing("qwen2_5_vl", {**TOWER2_5, "fullatt_block_indexes": [0, 3]}, [2, 3, 3], True),
    "qwen2_5_vl-yarn": seeing("qwen2_5_vl", TOWER2_5, [4, 2, 2], rope=YARN, num_key_value_heads=1),
    "qwen2_5_vl-wide": seeing("qwen2_5_vl", {**TOWER2_5, "hidden_size": 48, "num_heads": 2}, [2, 3, 3], num_hidden_layers=3),
    "qwen3_vl": seeing("qwen3_vl", TOWER3, [4, 2, 2], head_dim=16),
    "qwen3_vl-tied": seeing("qwen3_vl", {**TOWER3, "num_position_embeddings": 16}, [4, 2, 2], True, head_dim=16),
    "qwen3_vl-biased": seeing("qwen3_vl", TOWER3, [6, 5, 5], head_dim=32, attention_bias=True, num_key_value_heads=1),
    "qwen3_vl-deep": seeing(
        "qwen3_vl", {**TOWER3, "deepstack_visual_indexes": [1]}, [4, 2, 2], head_dim=16, num_hidden_layers=3
    ),
}

# With gated delta rule layers in their decoders.
PARTLY = {"partial_rotary_factor": 0.5}
HYBRID = DELTA | {"head_dim": 32, "num_hidden_layers": 3, "layer_types": [RULE, FULL, RULE]}
SEEING_HYBRIDS = {
    "qwen3_5": seeing("qwen3_5", TOWER3_5, [4, 2, 2], rope=PARTLY, **HYBRID),
    "qwen3_5_moe": seeing("qwen3_5_moe", TOWER3_5, [4, 2, 2], True, rope=PARTLY, **HYBRID, **SHARING),
}

# With images of one size, whose tokens see each other: windows longer than an image and shorter, squares of 1, 2 and 3 patches'
# sides, full layers between those with a window.
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}


def seeing_squares(tokens: int, tower: dict[str, Any], tied: bool = True, **text: Any) -> dict[str, Any]:
    text = GEMMA3 | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 20, "tie_word_embeddings": tied} | text
    ids = {"image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END}
    beside = {"mm_tokens_per_image": tokens, "tie_word_embeddings": tied, **ids}
    return {"model_type": "gemma3", "text_config": text, "vision_config": SIGLIP | tower, **beside}


SEEING_SQUARES = {
    "gemma3_vl": seeing_squares(4, {}, sliding_window=5),
    "gemma3_vl-narrow": seeing_squares(9, {"image_size": 24, "num_attention_heads": 4}, sliding_window=4),
    "gemma3_vl-untied": seeing_squares(16, {}, False, sliding_window=9, attention_bias=True, num_key_value_heads=1),
    "gemma3_vl-headed": seeing_squares(
        4,
        {"image_size": 12, "patch_size": 2, "hidden_size": 24, "vision_use_head": True},
        sliding_window=6,
        num_hidden_layers=3,
    ),
}

# With a token of text after each row of an image's tokens: squares of 2 and 3 patches' sides, both activations, biases.
ROW_BREAK = 6
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
PIXTRAL |= {"num_attention_heads": 2, "image_size": 64, "patch_size": 4}


def seeing_rows(tower: dict[str, Any], tied: bool = False, merge: int = 2, **text: Any) -> dict[str, Any]:
    text = SIZES | {"model_type": "mistral", "tie_word_embeddings": tied, "sliding_window": None} | text
    beside = {"image_token_index": IMAGE, "spatial_merge_size": merge, "tie_word_embeddings": tied}
    biased = {"multimodal_projector_bias": merge == 3}
    return {"model_type": "mistral3", "text_config": text, "vision_config": PIXTRAL | tower, **beside, **biased}


SEEING_ROWS = {
    "mistral3_vl": seeing_rows({"hidden_act": "silu"}),
    "mistral3_vl-tied": seeing_rows(
        {"num_attention_heads": 4, "hidden_size": 32, "patch_size": 2}, True, num_key_value_heads=1
    ),
    "mistral3_vl-threes": seeing_rows(
        {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}, merge=3, rms_norm_eps=0.01
    ),
}

# Gemma 4's: patches given with their places, products that are clipped or means that are standardised; tokens of an image that
# see each other in layers with a window, or not; and those without a tower.
PLACED = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
PLACED |= {"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 2}
NO_TOWER = {"patch_size": 2, "pooling_kernel_size": 3, "mm_embed_dim": 24, "mm_posemb_size": 64, "output_proj_dims": 24}


def seeing_placed(text: dict[str, Any], tower: dict[str, Any], **beside: Any) -> dict[str, Any]:
    tied = text.get("tie_word_embeddings", True)
    ids = {"image_token_id": IMAGE, "boi_token_id": VISION_START, "eoi_token_id": VISION_END, "tie_word_embeddings": tied}
    family = text["model_type"].removesuffix("_text")
    return {"model_type": family, "text_config": text, "vision_config": tower, **ids, **beside}


SEEING_PLACED = {
    "gemma4_vl": seeing_placed(GEMMA4 | SHARED_KEYS, PLACED | {"use_clipped_linears": True}),
    "gemma4_vl-whole": seeing_placed(
        GEMMA4 | KEYS_AS_VALUES | {"tie_word_embeddings": False},
        PLACED | {"standardize": True, "pooling_kernel_size": 3, "num_key_value_heads": 1, "head_dim": 12, "hidden_size": 24},
    ),
    "gemma4_unified_vl": seeing_placed(UNIFIED | KEYS_AS_VALUES, NO_TOWER),
    "gemma4_unified_vl-causal": seeing_placed(
        UNIFIED | {"use_bidirectional_attention": None, "tie_word_embeddings": False}, NO_TOWER
    ),
}

# Llama 4's tiles, each an image of its own here.
TILES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
TILES |= {"patch_size": 4, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24}


def seeing_tiles(tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    text = LLAMA4 | tied | text
    return {"model_type": "llama4", "text_config": text, "vision_config": TILES | tower, "image_token_index": IMAGE, **tied}


SEEING_TILES = {
    "llama4_vl": seeing_tiles({}),
    "llama4_vl-threes": seeing_tiles(
        {"pixel_shuffle_ratio": 1 / 3, "image_size": 18, "patch_size": 3, "intermediate_size": 144, "num_attention_heads": 4},
        tie_word_embeddings=True,
        num_key_value_heads=1,
    ),
}

# Of each family that takes images as no other does one model, and others.
FIRST_SEEING = ["mistral3_vl", "gemma4_vl", "gemma4_unified_vl", "llama4_vl"]
MORE_SEEING = [name for name in SEEING_ROWS | SEEING_PLACED | SEEING_TILES if name not in FIRST_SEEING]

# Several images in a sequence, ragged windows, two frames, none at all.
PROMPTS: list[tuple[int | tuple[int, int, int], ...]] = [
    (3, (1, 4, 6), 2, (2, 4, 4), 1),
    (5,),
    (1, (1, 6, 10)),
    (2, (1, 2, 2), 1, (1, 8, 2), 2),
    (4,),
    ((1, 4, 4),),
]
SQUARE = (1, 0, 0)  # an image of the one size that a model takes
SQUARE_PROMPTS: list[tuple[int | tuple[int, int, int], ...]] = [
    (3, SQUARE, 2, SQUARE, 1),
    (5,),
    (1, SQUARE),
    (2, SQUARE, SQUARE, 2),
    (4,),
    (SQUARE,),
]
STAND_IN = 49

# Sizes that 4 devices divide, and 8 the widths.
EVEN = {"vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
DIVISIBLE = {
    "even": QWEN3 | EVEN,
    "even-deep": QWEN3 | EVEN | {"num_hidden_layers": 8, "tie_word_embeddings": True},
    # Dense and sparse layers in turn.
    "even-moe": QWEN3
    | EVEN
    | EXPERTS
    | {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "even-moe-deep": QWEN3
    | EVEN
    | EXPERTS
    | {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "num_hidden_layers": 8, "decoder_sparse_step": 2},
    "even-latent": SIZES
    | EVEN
    | EXPERTS
    | dict(LATENT_WIDTHS, model_type="deepseek_v3", num_key_value_heads=8, n_routed_experts=8, first_k_dense_replace=0)
    | {"n_group": 4, "topk_group": 2},
    "even-latent-deep": SIZES
    | EVEN
    | EXPERTS
    | dict(LATENT_WIDTHS, model_type="deepseek_v3", num_key_value_heads=8, n_routed_experts=8, first_k_dense_replace=0)
    | {"n_group": 4, "topk_group": 2, "num_hidden_layers": 8},
    # Every part of Gemma 4's but keys that layers share, which stages cannot have.
    "even-gemma4": SIZES
    | EVEN
    | {"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 3.0, "attention_k_eq_v": True}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_global_key_value_heads": 2}
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "even-gemma3": GEMMA3 | EVEN | {"sliding_window": 5, "final_logit_softcapping": 3.0},
}


def write_random(name: str, directory: Path) -> Path:
    """A random model of these names."""
    see = SEEING | SEEING_HYBRIDS | SEEING_SQUARES | SEEING_ROWS | SEEING_PLACED | SEEING_TILES
    return write_config((MODELS | MORE | DIVISIBLE | see)[name], directory, name in see, seed=len(name))


def write_config(config: dict[str, Any], directory: Path, sees: bool = False, seed: int = 0) -> Path:
    """A random model of this config as transformers saves it, biases and norms drawn too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    sees = sees or "vision_config" in config
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(AutoConfig.for_model(**config))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
        if name.endswith("A_log"):  # of a delta rule, whose states would soon forget: some last for hundreds of tokens
            torch.nn.init.normal_(parameter, -3.0, 1.5)
    for name, buffer in model.named_buffers():
        if ".std_" in name or name.rpartition(".")[2] in ("input_min", "output_min", "input_max", "output_max"):
            torch.nn.init.normal_(buffer, 2.0 if "max" in name else -2.0 * ("min" in name), 0.3)
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            torch.nn.init.normal_(buffer, float(name.endswith("layer_scalar")), 0.2)
    model.save_pretrained(directory)
    return directory


def reference_model(directory: Path) -> Any:
    """transformers' own model. On one thread: torch's idle threads would take the other tests' cores."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)
    sees = "vision_config" in read_config(directory)
    return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(directory, dtype=torch.float32)


def torch_logits(directory: Path, sequences: list[np.ndarray], exact: bool = False) -> list[np.ndarray]:
    """transformers' logits `[T, vocab]` of each sequence alone. exact: computed in float64."""
    import torch

    model = reference_model(directory)
    model = model.double() if exact else model
    with torch.no_grad():
        return [model(torch.tensor(np.asarray(s)[None]).long()).logits[0].numpy() for s in sequences]


def stand_in_reference(directory: Path) -> Any:
    """transformers' own model, in which STAND_IN says what an image's id says as text."""
    import torch

    model = reference_model(directory)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[STAND_IN] = embeddings[IMAGE]
    return model


def seen_logits(model: Any, trajectory: Trajectory) -> Any:
    """transformers' own of one sequence alone, with its images."""
    import torch

    tokens = torch.tensor(trajectory.tokens).long()
    # It would take a token of the answer with an image's id for an image's: one that nothing else uses stands in for it.
    tokens[(tokens == IMAGE) & torch.tensor(trajectory.mask)] = STAND_IN
    if trajectory.images is None:
        return model(tokens[None]).logits[0]
    kinds = (tokens == IMAGE).int()[None]
    form, grids = image_format.format_of(model.config), trajectory.images.grids
    if form.directed:
        pixels = torch.tensor(trajectory.images.patches)
        return model(
            tokens[None], pixel_values=pixels, image_grid_thw=torch.tensor(grids).long(), mm_token_type_ids=kinds
        ).logits[0]
    starts = np.cumsum(grids.prod(axis=1))[:-1]
    if form.colours_last:
        of_each = zip(np.split(trajectory.images.patches, starts), grids.tolist(), strict=True)
        pixels, places = zip(*(in_rows(patches, grid, form.merge) for patches, grid in of_each), strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        shown = {"pixel_values": pad(pixels, True, 7.0), "image_position_ids": pad(places, True, -1)}
        if form.whole and model.config.model_type == "gemma4_unified":
            # The masks that transformers and vLLM generate with. Those of its forward pass alone let the tokens of an image
            # see each other in layers without a window too.
            embedded = model.get_input_embeddings()(tokens[None])
            how = {"attention_mask": None, "past_key_values": None, "position_ids": None, "mm_token_type_ids": kinds}
            shown["attention_mask"] = model.create_masks_for_generate(model.config, embedded, **how)
        return model(tokens[None], **shown, mm_token_type_ids=kinds).logits[0]
    given: dict[str, Any] = {"token_type_ids": kinds} if form.whole else {}
    each = [
        image_format.pixels_of(patches, form, grid.tolist())[0]
        for patches, grid in zip(np.split(trajectory.images.patches, starts), grids, strict=True)
    ]
    if form.rows:
        given["image_sizes"] = [x.shape[1:] for x in each]
    # What pads images of several sizes is not read.
    pixels = np.full((len(each), 3, *(max(x.shape[axis] for x in each) for axis in (1, 2))), 7.0, np.float32)
    for whole, x in zip(pixels, each, strict=True):
        whole[:, : x.shape[1], : x.shape[2]] = x
    return model(tokens[None], pixel_values=torch.tensor(pixels), **given).logits[0]


def in_rows(patches: np.ndarray, grid: list[int], merge: int) -> tuple[Any, Any]:
    """Patches as Gemma 4's processor gives them, row by row, and the column and row of each."""
    import torch

    _, height, width = grid
    squares = patches.reshape(height // merge, width // merge, merge, merge, -1)
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    places = torch.tensor(np.stack([columns, rows], -1).reshape(-1, 2))
    return torch.tensor(squares.swapaxes(1, 2).reshape(height * width, -1)), places


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sequences(*lengths: int, vocab: int = 50, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def trajectories(*lengths: int, vocab: int = 50, seed: int = 0) -> list[Trajectory]:
    """Trajectories of random tokens, a third of each the prompt, with plausible behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    made = []
    for n in lengths:
        tokens, prompt = rng.integers(0, vocab, n).astype(np.int32), n // 3
        logprobs: Any = -rng.exponential(2.0, n - prompt)
        made.append(Trajectory.from_completion(tokens[:prompt], tokens[prompt:], logprobs, np.zeros(n - prompt), 1.0))
    return made


def image_prompt(
    *parts: int | tuple[int, int, int], merge: int = 2, rows: bool = False
) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Tokens of text (so many) and of images (of these grids), each image between its marks; the grids. rows: a token of text
    stands between the rows of an image's tokens."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [20] * part
            continue
        shown = np.full((part[0] * part[1] // merge, part[2] // merge), IMAGE)
        shown = np.pad(shown, ((0, 0), (0, int(rows))), constant_values=ROW_BREAK)
        tokens += [VISION_START, *shown.reshape(-1)[: shown.size - rows], VISION_END]
    return np.array(tokens, np.int32), [part for part in parts if not isinstance(part, int)]


def shown_to(
    directory: Path, answer: int = 9, image_like: bool = True, seed: int = 0, ends: tuple[int, ...] = ()
) -> list[Trajectory]:
    """Trajectories with images that this model takes, and without. ends: further parts of each prompt."""
    form = image_format.format_of(image_format.described_config(read_config(directory)))
    prompts = SQUARE_PROMPTS if form.side else PROMPTS
    return of_form(form, *((*parts, *ends) for parts in prompts), answer=answer, image_like=image_like, seed=seed)


def of_form(form: image_format.ImageFormat, *prompts: Sequence[int | tuple[int, int, int]], **how: Any) -> list[Trajectory]:
    """As `with_images`, with images that towers of this form take in place of those of Qwen's."""

    def part_of_form(part: int | tuple[int, int, int]) -> int | tuple[int, int, int]:
        if isinstance(part, int):
            return part
        frames, height, width = part
        frames = frames if form.directed else 1
        return form.blank if part == SQUARE else (frames, height // 2 * form.merge, width // 2 * form.merge)

    made = [[part_of_form(part) for part in parts] for parts in prompts]
    return with_images(*made, features=form.features, merge=form.merge, rows=form.rows, **how)


def with_images(
    *prompts: Sequence[int | tuple[int, int, int]],
    answer: int = 9,
    image_like: bool = True,
    seed: int = 0,
    features: int = 3 * 2 * 4 * 4,
    merge: int = 2,
    rows: bool = False,
) -> list[Trajectory]:
    """A trajectory for each prompt of `image_prompt`, text, patches and answer drawn; patches are as those of SEEING.
    image_like: one token of the answer has the id of an image's."""
    rng = np.random.default_rng(seed)
    made = []
    for parts in prompts:
        prompt, grids = image_prompt(*parts, merge=merge, rows=rows)
        prompt = np.where(prompt == 20, rng.integers(9, 49, len(prompt)), prompt).astype(np.int32)
        drawn = rng.integers(9, 49, answer).astype(np.int32)
        if image_like:
            drawn[answer // 2] = IMAGE
        patches = rng.normal(size=(sum(int(np.prod(grid)) for grid in grids), features)).astype(np.float32)
        images = Images(patches, np.array(grids, np.int32)) if grids else None
        logprobs: Any = -rng.exponential(2.0, answer)
        made.append(Trajectory.from_completion(prompt, drawn, logprobs, np.zeros(answer), 1.0, images=images))
    return made
