"""Names the parts of a model that most language models do not have, from its config.json, so that a
backend that does not train a model can say why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_x.hf.model_dir import text_config

# Part → fields of a config that are there, and not 0 or false, if the model has it.
FIELDS: dict[str, tuple[str, ...]] = {
    "an encoder beside its decoder": ("is_encoder_decoder",),
    "images": ("vision_config",),
    "audio": ("audio_config",),
    "multi-head latent attention": ("kv_lora_rank",),
    "attention to selected keys": ("index_topk",),
    "attention in chunks": ("attention_chunk_size",),
    "attention sinks": ("add_swa_attention_sink_bias", "add_full_attention_sink_bias"),
    "gated delta rule layers": ("linear_num_value_heads", "linear_attn_config"),
    "state-space layers": ("state_size", "ssm_state_size", "mamba_d_state", "mamba_expand"),
    "recurrent layers": ("lru_width", "attention_hidden_size", "mlstm_round_up_to_multiple_of"),
    "convolutions over tokens": ("conv_L_cache",),
    "embeddings for each layer": ("hidden_size_per_layer_input",),
    "scores biased by distance": ("alibi",),
    "keys and values that layers share": ("num_kv_shared_layers",),
    "keys as values": ("attention_k_eq_v",),
    "heads of other widths in some layers": ("global_head_dim", "per_layer_config"),
    "experts beside each MLP": ("enable_moe_block",),
}
# Kind of layer, in layer_types → part. Kinds that are missing here are named as they are.
LAYERS = {
    "full_attention": "",
    "sliding_attention": "",
    "chunked_attention": "attention in chunks",
    "indexed_attention": "attention to selected keys",
    "compressed_sparse_attention": "attention to compressed keys",
    "heavily_compressed_attention": "attention to compressed keys",
    "linear_attention": "linear attention layers",
    "mamba": "state-space layers",
    "conv": "convolutions over tokens",
}


def special_parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the parts of a model that most language models do not have, in words. config: that of
    its config.json, or transformers' defaults."""
    text = text_config(config)
    found = [
        part
        for part, names in FIELDS.items()
        if any(whole.get(name) for whole in (config, text) for name in names)
    ]
    kinds = text.get("layer_types") or ()
    # Of a delta rule, "linear_attention" is the less precise name.
    known = {**LAYERS, "linear_attention": ""} if "gated delta rule layers" in found else LAYERS
    found += [known.get(kind, f"layers of the kind {kind}") for kind in map(str, kinds)]
    return tuple(part for part in dict.fromkeys(found) if part)


def with_parts(config: Mapping[str, Any]) -> str:
    """Returns " with " and the special parts of a model, for a sentence that names it; "" if it has
    none."""
    *others, last = special_parts(config) or ("",)
    return f" with {', '.join(others)}{' and ' if others else ''}{last}" if last else ""
