"""Tiny random models in Hugging Face form, written with numpy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CHARACTERS = "0123456789+=,>.abcdefghijklmnopqrstuvwxyz "

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": len(CHARACTERS) + 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def write_tokenizer(directory: Path, characters: str = CHARACTERS) -> None:
    """Writes a character tokenizer; ids 0 and 1 are padding and end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1, **{c: i + 2 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(directory)


def write_model(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """Writes a random Qwen3 with its tokenizer, in the form of `save_pretrained`, and returns the
    directory. changes: fields of its config.json."""
    from safetensors.numpy import save_file

    config = {**QWEN3, **changes}
    rng = np.random.default_rng(seed)
    # Norms are about 1, and matrices large enough that a wrong layer shows in the logits.
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.15)
        tensors[name] = rng.normal(mean, deviation, shape).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(directory)
    return directory


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a Qwen3 with this config, in the order of the file."""
    hidden, inner, head_dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key, hidden),
            prefix + "self_attn.v_proj.weight": (key, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
