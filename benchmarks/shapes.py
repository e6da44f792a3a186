"""Shapes of one model of each family for benchmarks/update.py and gpu.py, and the FLOPs of a training step.

FLOPs are counted, not measured, and as few as the family's function needs, so that a share of the peak is comparable between
families and implementations:

* 6 per token and parameter in a product, 2 forward and 4 backward: of a mixture's experts those that a token goes through, the
  router, experts beside, the head (a tied one once), a hybrid's convolution. Embeddings, norms and biases are no products.
* Attention: 6 · heads · (dim of keys + dim of values) for each pair of tokens that sees each other, half of a sequence's
  square, or what a window leaves of it. In latent attention these are the dims of the heads, after keys and values have been
  made from their vectors by products that count as such.
* A gated delta rule: 18 · key dim · value dim per token and value head, for the three products of a state with a key, a value
  and a query, token by token. What a chunked form computes besides (products within a chunk) counts as little as what a
  backward pass recomputes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import parameter_shapes

# About 25M parameters, most of them in the embedding.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,  # the only value that Tunix 0.1.7 uses, whatever its config contains
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "dtype": "float32",
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
HYBRID = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25},
}
RULE = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
OF_TOKEN = {"num_experts_per_tok": 4, "moe_intermediate_size": 288}  # as wide together as the dense model's MLP
LATENT = {"q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}

# The dense model's sizes in other families: as many features, layers, heads and parameters that a token goes through.
SMALL: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixture": DENSE
    | OF_TOKEN
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "norm_topk_prob": True},
    "latent": DENSE
    | OF_TOKEN
    | LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "head_dim": 32,  # of what rotates
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt-oss": DENSE
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 288,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "use_sliding_window": True,
        "sliding_window": 128,
        "rope_parameters": DEFAULT_ROPE,
        "attention_bias": True,
    },
    # Each kind of layer has a base of its rotation.
    "gemma4": {name: x for name, x in DENSE.items() if name not in ("rope_theta", "use_sliding_window", "hidden_act")}
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 128,
    },
    "hybrid": DENSE | HYBRID | RULE | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "hybrid-mixture": DENSE
    | HYBRID
    | RULE
    | OF_TOKEN
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 288,
        "norm_topk_prob": True,
    },
}

# Published models' sizes with as many of their layers as one GPU trains in fp32 (16 bytes a parameter, and activations).
LARGE: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B, 4 layers": SMALL["mixture"]
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Moonlight-16B-A3B, 4 layers": SMALL["latent"]
    | {
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b, 2 layers": SMALL["gpt-oss"]
    | {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "vocab_size": 201088,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3.5-9B, 4 layers": SMALL["hybrid"]
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}


def parameters_in_products(arch: Architecture) -> int:
    """Parameters of the products that one token goes through."""
    of_head = arch.hidden * arch.vocab
    return of_head + sum(_of_token(arch, name, x.shape) for name, x in parameter_shapes(arch)["layers"].items())


def _of_token(arch: Architecture, name: str, shape: tuple[int, ...]) -> int:
    """The same of one stack of parameters, whose first axis is the layer."""
    if len(shape) < 3 or name.endswith("_bias") or name == "router_correction":
        return 0
    whole = int(np.prod(shape))
    if not name.startswith("experts_"):
        return whole
    assert arch.experts is not None
    return whole // arch.experts.count * arch.experts.per_token


def flops_of(arch: Architecture, lengths: np.ndarray) -> float:
    """FLOPs of one training step on sequences of these lengths."""
    n = np.asarray(lengths, float)
    products = 6 * parameters_in_products(arch) * float(n.sum())
    return products + attention_flops(arch, n) + delta_rule_flops(arch, n)


def attention_flops(arch: Architecture, lengths: np.ndarray) -> float:
    n = np.asarray(lengths, float)
    of_heads = 0.0
    for layer in arch.layers_in("attention"):
        window = arch.windows[layer]
        seen = np.where((window == 0) | (n <= window), n**2 / 2, window * n - window**2 / 2)
        _, key_dim, value_dim = arch.heads_of(layer)
        of_heads += (key_dim + value_dim) * float(seen.sum())
    return 6 * arch.heads * of_heads


def delta_rule_flops(arch: Architecture, lengths: np.ndarray) -> float:
    rule = arch.delta
    if rule is None:
        return 0.0
    return 18 * len(rule.layers) * rule.value_heads * rule.key_dim * rule.value_dim * float(np.sum(lengths))


def parameters_of(arch: Architecture) -> int:
    """All parameters of a model."""
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(parameter_shapes(arch)))
