"""What a decoder is: sizes and features, read from a Hugging Face config.

Families differ in fields, never in subclasses: whoever adds one says here which of the features it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import ConfigError, UserError
from areal_x.model_dir import stem, text_config
from areal_x_jax.vision_shape import VisionShape, vision_shape_of

QKV, OUT, MLP = "biases of queries, keys and values", "a bias of the attention's output", "biases in the MLP"
LLAMA_BIASES = {"attention_bias": (QKV, OUT), "mlp_bias": (MLP,)}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True, "biases": {"attention_bias": (QKV, OUT)}},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "biases": {"attention_bias": (QKV, OUT)}, "sparse": True},
    "Qwen2ForCausalLM": {"always": (QKV,)},
    "Qwen2MoeForCausalLM": {"biases": {"qkv_bias": (QKV,)}, "sparse": True},
    "LlamaForCausalLM": {"biases": LLAMA_BIASES},
    "MistralForCausalLM": {},
    "Gemma3ForCausalLM": {"qk_norm": True, "gemma": True, "biases": {"attention_bias": (QKV, OUT)}},
    "Qwen2_5_VLForConditionalGeneration": {"always": (QKV,), "sees": True},
    "Qwen3VLForConditionalGeneration": {"qk_norm": True, "biases": {"attention_bias": (QKV, OUT)}, "sees": True},
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base θ, and how it is stretched beyond the length that a model was first trained on.

    kind: "default", "linear" (positions divided by factor), "llama3" or "yarn". low, high: where the frequencies begin to be
    stretched and where they are no more; for yarn in rotations over the original length (beta_slow, beta_fast).
    scale: of cosines and sines (yarn's attention factor).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    scale: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position of each pair of features, [head_dim / 2], in fp32.

        Sources: RoFormer, arXiv 2104.09864; linear, arXiv 2306.15595; yarn, arXiv 2309.00071, eq. 23; llama3, arXiv 2407.21783.
        """
        plain = (self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(np.float32)
        if self.kind == "default":
            return plain
        stretched = plain / np.float32(self.factor)
        if self.kind == "linear":
            return stretched
        if self.kind == "llama3":
            kept = (self.original * plain / (2 * np.pi) - self.low) / (self.high - self.low)
        else:

            def pair(rotations: float) -> float:
                """Which pair turns so often over the original length."""
                return float(head_dim * np.log(self.original / (rotations * 2 * np.pi)) / (2 * np.log(self.theta)))

            first, last = max(np.floor(pair(self.high)), 0), min(np.ceil(pair(self.low)), head_dim - 1)
            kept = 1 - (np.arange(head_dim // 2, dtype=np.float32) - first) / max(last - first, 0.001)
        kept = np.clip(kept, 0, 1)
        return (plain * kept + stretched * (1 - kept)).astype(np.float32)


@dataclass(frozen=True)
class Experts:
    """A mixture in place of each MLP. per_token: chosen for a token; normalised: whether their weights sum to 1; shared: width
    of the expert that every token has, 0 for none."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    shared: int = 0


@dataclass(frozen=True)
class Adapters:
    """LoRA's: kernels (as areal_x_jax.parameters calls them: "q", …) that have a product of two narrow matrices beside them.
    scale: of that product."""

    kernels: tuple[str, ...]
    rank: int
    scale: float


@dataclass(frozen=True)
class Shape:
    """Sizes and features of a decoder. heads share kv_heads in equal groups; head_dim need not be hidden / heads.

    windows: of each layer, how many tokens a token sees, itself included; 0 is all. ropes: of layers that see all, and, where
    they differ, of those with a window. scale: of queries. embed_scale: of embeddings. norm_offset: whether a norm's weight is
    counted from 1. out_norms: whether what attention and MLP give is normed before it is added. attention_softcap,
    logit_softcap: scores and logits are cap · tanh(x / cap); 0 is without. biases: which there are (QKV, OUT, MLP).
    scores: whether it says one number of each token, and no logits. vision: of the tower of a model that sees.
    context: tokens of the longest sequence that it was made for, 0 where nobody says.
    adapters: None for the decoder itself; else the parameters are what is trained beside a frozen decoder of this shape.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]
    scale: float
    biases: frozenset[str]
    qk_norm: bool
    tied: bool
    scores: bool
    activation: str = "silu"
    embed_scale: float = 1.0
    norm_offset: bool = False
    out_norms: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    experts: Experts | None = None
    vision: VisionShape | None = None
    context: int = 0
    adapters: Adapters | None = None

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` a layer turns by."""
        return int(len(self.ropes) > 1 and self.windows[layer] > 0)


def shape_of(config: Mapping[str, Any], head: str = "policy") -> Shape:
    """Reads a Hugging Face config. Raises: UserError naming what this decoder does not do and what would."""
    given = (config.get("architectures") or ["none"])[0].replace("3TextFor", "3For")
    architecture = next((known for known in FAMILIES if stem(known) == stem(given)), given)
    if architecture not in FAMILIES:
        raise UserError(
            f"the JAX backend does not know the architecture {architecture}; it knows {', '.join(FAMILIES)} "
            "(the torch backend trains any causal language model of transformers)"
        )
    family, whole, config = FAMILIES[architecture], config, text_config(config)
    gemma = bool(family.get("gemma"))
    activation = config.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    windows, ropes = windows_of(config, architecture, layers), ropes_of(config, gemma)
    refuse_unknown(
        {
            f"the activation {activation!r}": activation not in ACTIVATIONS,
            "dense layers between layers of experts": bool(family.get("sparse")) and not all_sparse(config),
            "bidirectional attention": bool(config.get("use_bidirectional_attention")),
            "a rotation of some features only": (config.get("partial_rotary_factor") or 1.0) != 1.0,
        }
    )
    asked = [bias for key, named in family.get("biases", {}).items() if config.get(key, key == "qkv_bias") for bias in named]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        eps=config.get("rms_norm_eps", 1e-6),
        ropes=ropes,
        windows=windows,
        scale=(config.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        biases=frozenset([*asked, *family.get("always", ())]),
        qk_norm=bool(family.get("qk_norm")),
        tied=bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", gemma))),
        scores=head != "policy",
        activation=ACTIVATIONS[activation],
        embed_scale=config["hidden_size"] ** 0.5 if gemma else 1.0,
        norm_offset=gemma,
        out_norms=gemma,
        attention_softcap=config.get("attn_logit_softcapping") or 0.0,
        logit_softcap=config.get("final_logit_softcapping") or 0.0,
        experts=experts_of(config) if family.get("sparse") else None,
        vision=vision_shape_of(whole) if family.get("sees") else None,
        context=context_of(config, ropes[0]),
    )


def context_of(config: Mapping[str, Any], rope: Rope) -> int:
    """What the config names, stretched as its positions are. (What llama3's names is stretched already.)"""
    named = int(config.get("max_position_embeddings") or 0)
    if rope.kind == "yarn":
        return max(named, int((rope.original or named) * rope.factor))
    return int(named * rope.factor) if rope.kind == "linear" else named


def windows_of(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """From the kinds of layers that newer configs list, or from the rule that each family has."""
    width = config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        refuse_unknown({f"layers of the kind {', '.join(sorted(unknown))}": bool(unknown)})
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    elif architecture.startswith("Gemma3"):
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        sliding = [(layer + 1) % every > 0 for layer in range(layers)]
    elif architecture.startswith("Mistral"):
        sliding = [True] * layers
    else:
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else layers
        sliding = [layer >= first for layer in range(layers)]
    return tuple(width if slides else 0 for slides in sliding)


def ropes_of(config: Mapping[str, Any], gemma: bool) -> tuple[Rope, ...]:
    given = config.get("rope_parameters") or {}
    if "full_attention" in given:
        return tuple(rope_of(given[kind], config) for kind in ("full_attention", "sliding_attention"))
    main = rope_of({**(config.get("rope_scaling") or {}), **given}, {"rope_theta": 1e6 if gemma else 1e4, **config})
    return (main, Rope(float(config.get("rope_local_base_freq", 10000.0)))) if gemma else (main,)


def rope_of(given: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "default" if kind == "mrope" else kind  # how positions have three axes says mrope_section
    refuse_unknown({f"rope scaling {kind!r}": kind not in ("default", "linear", "llama3", "yarn") or "mscale" in given})
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta)
    factor = float(given["factor"])
    original = int(given.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "llama3":
        return Rope(theta, kind, factor, float(given["low_freq_factor"]), float(given["high_freq_factor"]), original)
    scale = float(given.get("attention_factor") or 0.1 * np.log(factor) + 1)
    return Rope(theta, kind, factor, float(given.get("beta_slow") or 1), float(given.get("beta_fast") or 32), original, scale)


def experts_of(config: Mapping[str, Any]) -> Experts:
    return Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        normalised=bool(config.get("norm_topk_prob", False)),
        shared=config.get("shared_expert_intermediate_size") or 0,
    )


def all_sparse(config: Mapping[str, Any]) -> bool:
    return not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1


def refuse_unknown(features: Mapping[str, bool]) -> None:
    """Raises: UserError for the first feature that is asked for."""
    for feature, asked in features.items():
        if asked:
            raise UserError(
                f"the JAX backend does not do {feature}, which the model's config asks for: use train.backend = 'torch'"
            )


def check_sharing(shares: bool, directory: Path, shape: Shape) -> None:
    """Raises: ConfigError where prompts are to be shared by a model for which that would not be the same."""
    has = "sees images, whose positions are counted otherwise" if shape.vision is not None else ""
    if any(shape.windows):
        has = "has windows, which JAX counts by places in a row and not by positions (torch by positions)"
    if shares and has:
        raise ConfigError("train.share_prompts", True, f"False with {directory}, which {has}")
