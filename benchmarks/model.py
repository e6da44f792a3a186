"""The model and the text used for every comparison: a random Qwen3 of 0.6M parameters in fp32.

Hidden 128, 4 layers, 4 heads, 2 key-value heads, head_dim 32, intermediate 256, untied head, 99 characters. The tokenizer's end
token has id 99, one beyond the model's vocabulary: no completion stops early in any framework, and none has to spend time on
forbidding it.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np

from areal_x.testing.models import QWEN3

VOCABULARY = 99
PAD, END = 0, VOCABULARY
WORDS = string.ascii_lowercase + string.digits

CONFIG = {
    **QWEN3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "eos_token_id": None,
    "pad_token_id": PAD,
}


def write_model(directory: Path, seed: int = 0) -> Path:
    """Writes the model's Hugging Face directory: config, safetensors, tokenizer."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(_draw(np.random.default_rng(seed)), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return directory


def write_prompts(path: Path, lengths: np.ndarray, seed: int = 0) -> Path:
    """Writes a JSON list of random texts of these lengths in tokens (one character is one token)."""
    rng = np.random.default_rng(seed)
    path.write_text(json.dumps(["".join(rng.choice(list(WORDS), int(n))) for n in lengths]))
    return path


def _draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "model.norm": (hidden,), "lm_head": (VOCABULARY, hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    ones = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items() if len(shape) == 1}
    drawn = {
        f"{name}.weight": rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items() if len(shape) == 2
    }
    return ones | drawn


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 127)] + ["α", "β", "γ"]
    vocabulary = {"<pad>": PAD, **{c: i + 1 for i, c in enumerate(characters)}, "<end>": END}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(directory)
