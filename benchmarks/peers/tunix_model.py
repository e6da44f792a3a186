"""The benchmark's model as Tunix's own Qwen3, read by Tunix's own loader."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import jax
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors

VERSIONS = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}


def load(directory: str, mesh: jax.sharding.Mesh) -> Qwen3:
    c = json.loads((Path(directory) / "config.json").read_text())
    config = ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=c["head_dim"],
        num_kv_heads=c["num_key_value_heads"],
        rope_theta=c["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        use_tied_embedding=c["tie_word_embeddings"],
    )
    return create_model_from_safe_tensors(directory, config, mesh)
