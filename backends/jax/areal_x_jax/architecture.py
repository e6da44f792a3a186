"""The architecture of a decoder: sizes and features, read from a Hugging Face config.

Families differ in fields, never in subclasses: areal_x_jax.families lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import text_config
from areal_x_jax.delta_rule import DeltaRule, delta_rule_of
from areal_x_jax.families import parse_config, refuse_features
from areal_x_jax.latent_attention import Latent, latent_of, latent_scale
from areal_x_jax.mixtures import Experts, experts_of
from areal_x_jax.rope import Rope, rope_indices, ropes_of
from areal_x_jax.varied_layers import STACKS as OF_SHAPES
from areal_x_jax.varied_layers import VariedLayers, heads_of_kind, varied_layers_of
from areal_x_jax.vision_architecture import VisionArchitecture
from areal_x_jax.vision_families import read_vision_architecture
from areal_x_jax.windows import windows_of

STACKS = ("layers", "dense", "sparse", "recurrent", "attention", *OF_SHAPES)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters beside some kernels."""

    kernels: tuple[str, ...]
    """Adapted kernels, under the names of areal_x_jax.parameters ("q", …)."""

    rank: int

    scale: float
    """Factor of the product of the two narrow matrices."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and features of a decoder. heads share kv_heads in equal groups; head_dim need not be
    hidden / heads."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    ropes: tuple[Rope, ...]
    """The rotations that layers have."""

    layer_ropes: tuple[int, ...]
    """For each layer the index of its rotation."""

    windows: tuple[int, ...]
    """For each layer the number of tokens that a token sees, itself included; 0 is all. See
    `chunked`."""

    scale: float
    """Factor of queries."""

    biases: frozenset[str]
    """Those of QKV, OUT and MLP that exist."""

    qk_norm: bool
    """True if each head's query and key are normalised."""

    tied: bool
    """True if the head is the transposed embedding."""

    scores: bool
    """True for critics and reward models: one number per token in place of logits."""

    activation: str = "silu"

    wide_qk_norm: bool = False
    """True if all heads' are together."""

    embed_scale: float = 1.0
    """Factor of embeddings."""

    residual_scale: float = 1.0
    """Factor of what attention and MLP add."""

    logit_scale: float = 1.0
    """Factor of logits, and so of the head's input."""

    interleaved: bool = False
    """True if a rotation's pairs are neighbouring features."""

    sinks: bool = False
    """True if each head has a score that competes with its keys' and adds nothing. Source: arXiv
    2309.17453."""

    fused: tuple[str, ...] = ()
    """Kernels that are one parameter: "qkv", "gate_up"."""

    names: tuple[tuple[str, str], ...] = ()
    """Hugging Face's modules of parameters whose names differ from other families'."""

    centred: bool = False
    """True if norms subtract the mean."""

    parallel: bool = False
    """True if attention and MLP read the same normalised input."""

    in_norms: bool = True
    """True if the inputs of attention and MLP are normalised."""

    norm_offset: bool = False
    """True if a norm's scale is 1 + its weight."""

    out_norms: bool = False
    """True if the outputs of attention and MLP are normalised before they are added."""

    attention_softcap: float = 0.0
    """Scores are cap · tanh(x / cap); 0 turns it off."""

    logit_softcap: float = 0.0
    """The same for logits."""

    fp8: bool = False
    """True if products with kernels of layers are of numbers rounded to fp8 (areal_x_jax.fp8)."""

    experts: Experts | None = None

    latent: Latent | None = None
    """Multi-head latent attention, where head_dim is that of queries and keys; None for other
    attention."""

    predictors: int = 0
    """Layers after the last in which a checkpoint may have heads for further tokens. They are not
    read: transformers leaves them out too."""

    delta: DeltaRule | None = None
    """The layers that have a gated delta rule in place of attention."""

    gated: bool = False
    """True if each head's output of attention has a gate, computed with its query."""

    pad: int = 0
    """Token whose inputs of layers (areal_x_jax.layer_inputs) those of images are."""

    vision: VisionArchitecture | None = None
    """The vision tower of a vision-language model."""

    module: str = ""
    """`Family.module`: where the language model is in a multimodal checkpoint whose other parts are
    kept as they are."""

    memory: str = ""
    """`Family.memory`."""

    chunked: bool = False
    """True if sequences are cut into chunks of the length of a layer's window, and a token sees
    those before it in its own chunk."""

    unit_qk: bool = False
    """True if the queries and keys of each head are divided by their RMS in layers that rotate."""

    temperature: tuple[float, float] | None = None
    """Slope a and length n of a factor of queries in layers that do not rotate, 1 + a · log(1 +
    ⌊(position + 1) / n⌋); None for none. Source: arXiv 2501.19399."""

    varied: VariedLayers | None = None
    """Layers of several shapes."""

    context: int = 0
    """Longest sequence that the model was made for, in tokens; 0 if unknown."""

    stages: tuple[int, int] = (1, 1)
    """Stages of a pipeline and the groups of layers that each has: see `stacked`."""

    adapters: Adapters | None = None
    """None for the decoder itself; otherwise the parameters are those trained beside a frozen
    decoder of this architecture."""

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotations are made for (`Rope.part` of them are rotated)."""
        return self.latent.rotated if self.latent else self.head_dim

    def layers_in(self, stack: str) -> tuple[int, ...]:
        """Returns the layers whose parameters a stack of STACKS holds: all "layers"; with a mixture, the
        "dense" or the "sparse" ones; with a delta rule, the "recurrent" ones or those with
        "attention"; with several shapes, those of `VariedLayers.layers_in`."""
        if stack in OF_SHAPES:
            return self.varied.layers_in(stack, self.layers) if self.varied else ()
        dense = self.experts.dense if self.experts else ()
        recurrent = self.delta.layers if self.delta else ()
        every = tuple(range(self.layers))
        return {
            "layers": every,
            "dense": dense,
            "sparse": tuple(layer for layer in every if layer not in dense),
            "recurrent": recurrent,
            "attention": tuple(layer for layer in every if layer not in recurrent),
        }[stack]

    def stacked(self, stack: str) -> tuple[int, ...]:
        """Returns the layers of `layers_in` in the order in which the stack has them: all of the first
        stage, then those of the next, so that a stage has its groups in one part of the stack. Stage
        i of s has the groups i, i + s, …; with one group each the order is the model's."""
        stages, groups = self.stages
        each = self.layers // (stages * groups)
        return tuple(
            sorted(self.layers_in(stack), key=lambda layer: (layer // each % stages, layer))
        )

    def kinds(self) -> list[tuple[bool, ...]]:
        """Returns for each layer whether it is dense, whether it is recurrent, and of what shape."""
        dense, recurrent = self.layers_in("dense"), self.layers_in("recurrent")
        return [
            (
                layer in dense,
                layer in recurrent,
                *(self.varied.kind(layer) if self.varied else ()),
            )
            for layer in range(self.layers)
        ]

    def attends_to(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer attends to."""
        return self.varied.source(layer) if self.varied else layer

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """Returns a layer's heads of keys and values, and the features of its keys and of its
        values."""
        if self.varied and layer in self.varied.full:
            return self.varied.kv_heads, self.varied.head_dim, self.varied.head_dim
        return self.kv_heads, self.head_dim, self.value_dim

    def is_shared(self, layer: int) -> bool:
        """True if other layers attend to this one's keys and values."""
        return self.varied is not None and self.varied.is_shared(layer)

    @property
    def with_keys(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(i for i in self.layers_in("attention") if self.attends_to(i) == i)


def read_architecture(config: Mapping[str, Any], head: str = "policy") -> Architecture:
    """Reads a Hugging Face config.

    Raises: UserError naming what this backend does not support and what would work.
    """
    described = parse_config(config)
    family, text = described.family, described.text
    gemma, layers, heads = family.gemma, text.num_hidden_layers, text.num_attention_heads
    vision = read_vision_architecture(config) if family.has_vision else None
    written = text_config(config)
    latent, varied = latent_of(described, written), varied_layers_of(described)
    if varied is None:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = text.num_key_value_heads or heads
    else:
        head_dim, kv_heads = heads_of_kind(text, text.layer_types, full=False)
    activation = text.hidden_activation if gemma else text.hidden_act
    inputs = family.router == "inputs"
    windows, ropes = windows_of(described, config), ropes_of(described)
    turned = head_dim if varied else int(head_dim * ropes[0].part)

    bidirectional, capped = (
        getattr(text, name, None)
        for name in ("use_bidirectional_attention", "attn_logit_softcapping")
    )

    def own(name: str, default: float) -> float:
        return float(getattr(text, name)) if name in family.reads else default

    refuse_features(
        {
            f"the activation {activation!r}": activation not in ACTIVATIONS,
            # Among the tokens of images alone it is no matter of text.
            "bidirectional attention": bool(bidirectional)
            and not (varied and bidirectional == "vision"),
            f"attn_logit_softcapping = {capped}, which transformers leaves out": (
                gemma and bool(capped)
            ),
            "final_logit_softcapping in a multimodal model, which transformers leaves out": bool(
                gemma and family.module and not varied and text.final_logit_softcapping
            ),
            f"heads of {head_dim} features, of which {turned} are rotated in pairs": turned % 2 > 0,
            f"the activation {activation!r} where this family clamps another": (
                family.clamped and activation != "silu"
            ),
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
    scale = (getattr(text, "query_pre_attn_scalar", 1) if gemma else head_dim) ** -0.5
    if latent is not None:
        head_dim = latent.plain + latent.rotated
        scale = latent_scale(latent, ropes[0], text.rope_parameters)
    asked = [bias for key, named in family.biases.items() if getattr(text, key) for bias in named]
    return Architecture(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        # none without dense layers
        intermediate=(
            text.intermediate_size_mlp if inputs else getattr(text, "intermediate_size", 0)
        ),
        eps=text.layer_norm_eps if family.centred else text.rms_norm_eps,
        ropes=ropes,
        layer_ropes=rope_indices(described, windows),
        windows=windows,
        scale=own("attention_multiplier", scale),
        biases=frozenset([*asked, *family.always]),
        qk_norm=(
            family.qk_norm or ("use_qk_norm" in family.reads and not inputs and text.use_qk_norm)
        ),
        tied=bool(described.whole.tie_word_embeddings),
        scores=head != "policy",
        activation=ACTIVATIONS[activation],
        wide_qk_norm=family.wide_qk_norm,
        embed_scale=own("embedding_multiplier", text.hidden_size**0.5 if gemma else 1.0),
        residual_scale=own("residual_multiplier", 1.0),
        logit_scale=(
            own("logit_scale", 1.0) / own("logits_scaling", 1.0) if head == "policy" else 1.0
        ),
        interleaved=(
            bool(text.rope_interleave) if "rope_interleave" in family.reads else family.interleaved
        ),
        sinks=family.sinks,
        fused=family.fused,
        names=family.names,
        centred=family.centred,
        parallel=family.parallel,
        in_norms=family.in_norms,
        norm_offset=(gemma and not varied) or family.delta,
        out_norms=family.out_norms,
        logit_softcap=(getattr(text, "final_logit_softcapping", None) or 0.0) if gemma else 0.0,
        experts=experts_of(described, written),
        latent=latent,
        predictors=(getattr(text, "num_nextn_predict_layers", 0) or 0) if family.router else 0,
        delta=delta_rule_of(described),
        gated=family.delta,
        pad=getattr(text, "pad_token_id", None) or 0,
        vision=vision,
        module=family.module,
        memory=family.memory,
        chunked=family.chunked,
        unit_qk=inputs and bool(text.use_qk_norm),
        temperature=(
            (float(text.attn_scale), float(text.floor_scale))
            if inputs and text.attn_temperature_tuning
            else None
        ),
        varied=varied,
        context=context_of(text.max_position_embeddings, ropes[0]),
    )


def context_of(named: int, rope: Rope) -> int:
    """Returns the model's longest sequence: the config's number, scaled as its positions are.
    (llama3's is scaled already.)"""
    if rope.kind == "yarn":
        return max(named, int(rope.original * rope.factor))
    return int(named * rope.factor) if rope.kind == "linear" else named


def check_sharing(shares: bool, directory: Path, arch: Architecture) -> None:
    """Raises: ConfigError if tokens are to be shared by a model for which that would change the
    numbers."""
    has = (
        "has a vision tower, whose positions are counted differently"
        if arch.vision is not None and arch.vision.sections
        else ""
    )
    if arch.chunked:
        has = "has attention in chunks, which JAX does not compute over shared tokens"
    if arch.delta is not None:
        has = (
            "has gated delta rule layers, whose states JAX does not continue from those of shared"
            " tokens (torch does)"
        )
    if shares and has:
        raise ConfigError("train.share_prompts", True, f"False with {directory}, which {has}")
