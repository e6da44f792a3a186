"""What a decoder is: sizes and features, read from a Hugging Face config.

Families differ in fields, never in subclasses: areal_x_jax.families lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import text_config
from areal_x_jax.families import ParsedConfig, parse_config, refuse_features
from areal_x_jax.rope import Rope, ropes_of
from areal_x_jax.vision_architecture import VisionArchitecture, read_vision_architecture

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Experts:
    """A mixture in place of each MLP. per_token: chosen for a token; normalised: whether their
    weights sum to 1; shared: width of the expert that every token has, 0 for none. dense: the
    layers that keep their MLP."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    shared: int = 0
    dense: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adapters:
    """LoRA's: kernels (as areal_x_jax.parameters calls them: "q", …) that have a product of two
    narrow matrices beside them. scale: of that product."""

    kernels: tuple[str, ...]
    rank: int
    scale: float


@dataclass(frozen=True)
class Architecture:
    """Sizes and features of a decoder. heads share kv_heads in equal groups; head_dim need not be
    hidden / heads.

    windows: of each layer, how many tokens a token sees, itself included; 0 is all. ropes: of
    layers that see all, and, where they differ, of those with a window. scale: of queries.
    embed_scale: of embeddings. norm_offset: whether a norm's weight is counted from 1. out_norms:
    whether what attention and MLP give is normed before it is added. attention_softcap,
    logit_softcap: scores and logits are cap · tanh(x / cap); 0 is without. biases: which there are
    (QKV, OUT, MLP). scores: whether it says one number of each token, and no logits. vision: of the
    tower of a model that sees. context: tokens of the longest sequence that it was made for, 0
    where nobody says. adapters: None for the decoder itself; else the parameters are what is
    trained beside a frozen decoder of this shape.
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
    vision: VisionArchitecture | None = None
    context: int = 0
    adapters: Adapters | None = None

    def layers_in(self, stack: str) -> tuple[int, ...]:
        """The layers that a stack of parameters is of: all "layers" or, of a mixture, the "dense"
        or the "sparse" ones."""
        dense = self.experts.dense if self.experts else ()
        every = tuple(range(self.layers))
        return {
            "layers": every,
            "dense": dense,
            "sparse": tuple(layer for layer in every if layer not in dense),
        }[stack]

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` a layer turns by."""
        return int(len(self.ropes) > 1 and self.windows[layer] > 0)


def read_architecture(config: Mapping[str, Any], head: str = "policy") -> Architecture:
    """Reads a Hugging Face config. Raises: UserError naming what this decoder does not do and what
    would."""
    described = parse_config(config)
    family, text = described.family, described.text
    gemma, layers, heads = family.gemma, text.num_hidden_layers, text.num_attention_heads
    vision = read_vision_architecture(config) if family.sees else None
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = text.num_key_value_heads or heads
    activation = text.hidden_activation if gemma else text.hidden_act
    windows, ropes = windows_of(described, config), ropes_of(described)
    refuse_features(
        {
            f"the activation {activation!r}": activation not in ACTIVATIONS,
            "bidirectional attention": bool(getattr(text, "use_bidirectional_attention", False)),
            f"attn_logit_softcapping = {getattr(text, 'attn_logit_softcapping', None)}, which transformers leaves out": (
                gemma and bool(text.attn_logit_softcapping)
            ),
            f"heads of {head_dim} features, which have no halves": head_dim % 2 > 0,
        }
    )
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_key_value_heads = {kv_heads} does not divide num_attention_heads ="
            f" {heads}"
        )
    if family.model_type == "qwen2_5_vl" and head_dim * heads != text.hidden_size:
        raise UserError(
            f"config.json: {heads} heads of head_dim = {head_dim} do not make up hidden_size ="
            f" {text.hidden_size}"
        )
    asked = [bias for key, named in family.biases.items() if getattr(text, key) for bias in named]
    return Architecture(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=text.intermediate_size,
        eps=text.rms_norm_eps,
        ropes=ropes,
        windows=windows,
        scale=(text.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        biases=frozenset([*asked, *family.always]),
        qk_norm=family.qk_norm,
        tied=bool(described.whole.tie_word_embeddings),
        scores=head != "policy",
        activation=ACTIVATIONS[activation],
        embed_scale=text.hidden_size**0.5 if gemma else 1.0,
        norm_offset=gemma,
        out_norms=gemma,
        logit_softcap=(getattr(text, "final_logit_softcapping", None) or 0.0) if gemma else 0.0,
        experts=experts_of(described),
        vision=vision,
        context=context_of(text.max_position_embeddings, ropes[0]),
    )


def context_of(named: int, rope: Rope) -> int:
    """What the config names, stretched as its positions are. (What llama3's names is stretched
    already.)"""
    if rope.kind == "yarn":
        return max(named, int(rope.original * rope.factor))
    return int(named * rope.factor) if rope.kind == "linear" else named


def windows_of(described: ParsedConfig, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of each layer how many tokens it sees, 0 for all: as transformers' rule for the family and
    its defaults have it.

    config: as it was written. Raises: UserError where it asks for windows that the family has not.
    """
    text, rule = described.text, described.family.windows
    layers, width, kinds = (
        text.num_hidden_layers,
        getattr(text, "sliding_window", None),
        getattr(text, "layer_types", None),
    )
    if text.model_type == "ministral":
        rule = "layer_types"
    unknown = ", ".join(sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}))
    refuse_features({f"layers of the kind {unknown}": bool(unknown)})
    listed = [kind == "sliding_attention" for kind in kinds or ()]
    every = {"layer_types": listed, "all": [width is not None] * layers, "none": [False] * layers}
    sliding = every[rule][:layers]
    written = text_config(config)
    pattern = written.get("_sliding_window_pattern", 6)
    refuse_features(
        {
            f"sliding_window = {width} in layers with a window": (
                any(sliding) and not (width or 0) > 0
            ),
            "layer_types, which transformers leaves out in this family": (
                bool(listed) and listed[:layers] != sliding
            ),
            f"sliding_window = {width}, which transformers leaves out in this family": (
                rule == "none" and bool(width) and bool(getattr(text, "use_sliding_window", True))
            ),
            f"_sliding_window_pattern = {pattern} (sliding_window_pattern is read)": (
                described.family.gemma
                and pattern != 6
                and not {"layer_types", "sliding_window_pattern"} & set(written)
            ),
        },
        "mend its config.json",
    )
    return tuple(int(width or 0) if slides else 0 for slides in sliding)


def experts_of(described: ParsedConfig) -> Experts | None:
    """None where no layer has any."""
    family, text = described.family, described.text
    if not family.sparse:
        return None
    layers, plain = range(text.num_hidden_layers), set(text.mlp_only_layers)
    sparse = [i for i in layers if i not in plain and (i + 1) % text.decoder_sparse_step == 0]
    if not sparse or not text.num_experts:
        return None
    if text.num_experts_per_tok > text.num_experts:
        raise UserError(
            f"config.json: num_experts_per_tok = {text.num_experts_per_tok} are more than its"
            f" num_experts = {text.num_experts}"
        )
    shared = text.shared_expert_intermediate_size if family.shared else 0
    refuse_features({"a shared expert without features": family.shared and not shared})
    return Experts(
        count=text.num_experts,
        per_token=text.num_experts_per_tok,
        intermediate=text.moe_intermediate_size,
        normalised=bool(text.norm_topk_prob),
        shared=shared,
        dense=tuple(i for i in layers if i not in sparse),
    )


def check_sharing(shares: bool, directory: Path, arch: Architecture) -> None:
    """Raises: ConfigError where prompts are to be shared by a model for which that would not be the
    same."""
    has = "sees images, whose positions are counted otherwise" if arch.vision is not None else ""
    if any(arch.windows):
        has = (
            "has windows, which JAX counts by places in a row and not by positions (torch by"
            " positions)"
        )
    if shares and has:
        raise ConfigError("train.share_prompts", True, f"False with {directory}, which {has}")
