"""The model that learns to add: a Qwen3 of 595 thousand parameters and a character tokenizer, in Hugging Face form.

Written with numpy alone: neither backend is needed to make it, and both start from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from areal_x.model_dir import WEIGHTS
from examples.arithmetic.task import ALPHABET

PAD, END = 0, 1
VOCABULARY = ("<pad>", "<end>", *ALPHABET)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "dtype": "float32",
}


def write_model(directory: Path, seed: int) -> None:
    """A model directory with random weights: config.json, model.safetensors and the tokenizer."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    rng = np.random.default_rng([3, seed])
    tensors = {
        name: np.ones(shape) if len(shape) == 1 else rng.normal(0, spread(name, shape), shape)
        for name, shape in tensor_shapes()
    }
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})
    write_tokenizer(directory)


def spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of first values: 1/√inputs, less where a layer adds to the residual stream (as GPT-2 does).

    transformers' 0.02 for all is meant for wide models: at this width, with a learning rate of 4e-3 and 3 carries of 4
    forgotten, supervision then left 59 to 76 % of the sums with a carry likelier right than wrong, and with these spreads 99 %.
    """
    if name == "model.embed_tokens.weight":
        return 0.3
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    return float(shape[1] ** -0.5 * ((2 * CONFIG["num_hidden_layers"]) ** -0.5 if adds else 1))


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Qwen3 by its Hugging Face name; matrices are [out, in]."""
    vocabulary, hidden, inner, head = (CONFIG[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (queries, hidden)
        yield layer + "self_attn.k_proj.weight", (keys, hidden)
        yield layer + "self_attn.v_proj.weight", (keys, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, queries)
        yield layer + "self_attn.q_norm.weight", (head,)
        yield layer + "self_attn.k_norm.weight", (head,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write_tokenizer(directory: Path) -> None:
    """One token a character, written without transformers, whose import takes seconds."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>", "model_max_length": 256}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def encode(text: str) -> Int32[np.ndarray, " characters"]:
    """The token ids that the tokenizer gives."""
    return np.array([2 + ALPHABET.index(c) for c in text], np.int32)
