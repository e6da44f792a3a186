"""The model families that the JAX backend supports, and their configs as transformers reads them.

A field missing from config.json has the default of transformers' configuration class, which also
translates older spellings (rope_scaling, flat configs of vision-language models): no default is
repeated here. Families differ in fields, not in classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from areal_x.errors import UserError
from areal_x.hf.image_format import SEEN
from areal_x.hf.model_dir import CAUSAL, CLASSIFIER, CONDITIONAL, stem
from areal_x.hf.model_parts import with_parts

QKV, OUT, MLP = (
    "biases of queries, keys and values",
    "a bias of the attention's output",
    "biases in the MLP",
)
LATENTS = "biases of latent vectors"
ATTENTION_BIAS = {"attention_bias": (QKV, OUT)}


@dataclass(frozen=True)
class Family:
    """Features of a model family."""

    model_type: str
    """Hugging Face's model_type."""

    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Which of QKV, OUT, MLP and LATENTS a field of the config switches on."""

    always: tuple[str, ...] = ()
    """Biases that no field switches."""

    windows: str = "layer_types"
    """Layers with a window: those that the config's "layer_types" lists, "all" or "none"."""

    qk_norm: bool = False

    gemma: bool = False

    sparse: bool = False
    """True if MLPs are mixtures of experts."""

    shared: bool = False
    """True if every token also goes through a shared expert."""

    router: str = ""
    """The rule of a mixture's routers if it is not the plain one: "greedy", "noaux_tc", "statics" or
    "inputs" (areal_x_jax.routers)."""

    latent: bool = False
    """True for multi-head latent attention (areal_x_jax.latent_attention)."""

    has_vision: bool = False
    """True for vision-language models that are trained with images."""

    module: str = ""
    """Module of the language model in a multimodal checkpoint of which it alone is trained, on text:
    the tensors of other parts are kept as they are. "" for all other models."""

    memory: str = ""
    """That module in memory, after which PEFT names adapters."""

    text_type: str = ""
    """model_type of that language model."""

    chunked: bool = False
    """True if layers with a window see the tokens of their own chunk of a sequence only."""

    wide_qk_norm: bool = False
    """True if all heads' queries are normalised together, and all keys."""

    in_norms: bool = True
    """True if the inputs of attention and MLP are normalised."""

    out_norms: bool = False
    """True if their outputs are, before they are added."""

    parallel: bool = False
    """True if attention and MLP read the same normalised input."""

    centred: bool = False
    """True if norms subtract the mean (layer norm)."""

    interleaved: bool = False
    """True if a rotation's pairs are neighbouring features and not halves of a head."""

    unturned: str = ""
    """Layers whose positions are not rotated: those that "no_rope_layers" lists as 0, or the "full"
    ones beside those with a window; "" for none."""

    ropes_by_kind: bool = False
    """True if layers with full attention and those with a window have rotations of their own."""

    sinks: bool = False
    """True if each head has a score that competes with its keys' and adds nothing."""

    clamped: bool = False
    """True if experts have biases and a clamped activation, and are saved all in one tensor."""

    delta: bool = False
    """True if layers have a gated delta rule in place of attention, and a gate of attention's output
    elsewhere."""

    joined: bool = False
    """True if the projections of these layers are two kernels (see areal_x_jax.delta_rule)."""

    fused: tuple[str, ...] = ()
    """Kernels that are saved as one: "qkv", "gate_up"."""

    reads: tuple[str, ...] = ()
    """Fields of FOREIGN that this family has."""

    names: tuple[tuple[str, str], ...] = ()
    """Modules of some parameters (areal_x_jax.parameters) where they have other names than
    elsewhere."""

    varied: bool = False
    """True if layers have several shapes (areal_x_jax.varied_layers)."""


# Granite's, of embeddings, outputs of attention and MLP, scores and (as a divisor) logits.
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
OUT_NORMS = (
    ("attention_out_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_feedforward_layernorm"),
)
OLMO: dict[str, Any] = {
    **dict.fromkeys(("qk_norm", "wide_qk_norm", "out_norms"), True),
    "in_norms": False,
    "names": OUT_NORMS,
}
COHERE: dict[str, Any] = {
    **dict.fromkeys(("parallel", "centred", "interleaved"), True),
    "reads": ("logit_scale",),
}
GLM: dict[str, Any] = {"windows": "none", "interleaved": True, "fused": ("gate_up",)}
PARTLY_TURNED = ("partial_rotary_factor",)
LATENT: dict[str, Any] = {**dict.fromkeys(("latent", "interleaved"), True), "windows": "none"}
OF_LATENTS = ("kv_lora_rank", "rope_interleave")
OF_EXPERTS = (
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
    "routed_scaling_factor",
)
NOAUX: dict[str, Any] = {"sparse": True, "router": "noaux_tc"}
DELTA: dict[str, Any] = {
    "biases": ATTENTION_BIAS,
    "windows": "none",
    "reads": PARTLY_TURNED,
    **dict.fromkeys(("qk_norm", "delta"), True),
}
GEMMA_NORMS = (*OUT_NORMS, ("mlp_norm", "pre_feedforward_layernorm"))
GEMMA4: dict[str, Any] = {
    **dict.fromkeys(("qk_norm", "gemma", "out_norms", "ropes_by_kind", "varied"), True),
    "names": GEMMA_NORMS,
}
MIXTRAL_EXPERTS = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", ATTENTION_BIAS, qk_norm=True),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", ATTENTION_BIAS, windows="all", qk_norm=True, sparse=True
    ),
    "Qwen2ForCausalLM": Family("qwen2", always=(QKV,)),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", {"qkv_bias": (QKV,)}, sparse=True, shared=True),
    "LlamaForCausalLM": Family("llama", {**ATTENTION_BIAS, "mlp_bias": (MLP,)}, windows="none"),
    "MistralForCausalLM": Family("mistral", windows="all"),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows="all",
        sparse=True,
        names=(
            ("router", "block_sparse_moe.gate"),
            *(
                (f"experts_{x}", f"block_sparse_moe.experts.{{expert}}.{w}")
                for x, w in MIXTRAL_EXPERTS
            ),
        ),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        ATTENTION_BIAS,
        qk_norm=True,
        gemma=True,
        out_norms=True,
        ropes_by_kind=True,
        names=GEMMA_NORMS,
    ),
    "Gemma4ForCausalLM": Family("gemma4_text", ATTENTION_BIAS, **GEMMA4),
    "Gemma4UnifiedForCausalLM": Family("gemma4_unified_text", ATTENTION_BIAS, **GEMMA4),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        ATTENTION_BIAS,
        sparse=True,
        sinks=True,
        clamped=True,
        names=(("router", "mlp.router"), ("router_bias", "mlp.router")),
    ),
    "Olmo2ForCausalLM": Family("olmo2", ATTENTION_BIAS, windows="none", **OLMO),
    "Olmo3ForCausalLM": Family("olmo3", ATTENTION_BIAS, ropes_by_kind=True, **OLMO),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {**ATTENTION_BIAS, "mlp_bias": (MLP,)},
        unturned="listed",
        reads=("no_rope_layers",),
    ),
    "GraniteForCausalLM": Family(
        "granite",
        {**ATTENTION_BIAS, "mlp_bias": (MLP,)},
        windows="none",
        reads=MULTIPLIERS,
    ),
    "CohereForCausalLM": Family("cohere", ATTENTION_BIAS, windows="none", **COHERE),
    "Cohere2ForCausalLM": Family("cohere2", ATTENTION_BIAS, unturned="full", **COHERE),
    "Phi3ForCausalLM": Family("phi3", windows="all", fused=("qkv", "gate_up"), reads=PARTLY_TURNED),
    "GlmForCausalLM": Family("glm", {"attention_bias": (QKV,)}, reads=PARTLY_TURNED, **GLM),
    "Glm4ForCausalLM": Family(
        "glm4",
        {"attention_bias": (QKV,)},
        out_norms=True,
        reads=PARTLY_TURNED,
        names=(
            ("attention_out_norm", "post_self_attn_layernorm"),
            ("mlp_out_norm", "post_mlp_layernorm"),
        ),
        **GLM,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        {"attention_bias": (LATENTS, OUT), "mlp_bias": (MLP,)},
        sparse=True,
        router="greedy",
        reads=("kv_lora_rank", *OF_EXPERTS),
        **LATENT,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {"attention_bias": (LATENTS, OUT)},
        reads=(*OF_LATENTS, *OF_EXPERTS),
        **LATENT,
        **NOAUX,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {"attention_bias": (QKV,)},
        windows="none",
        reads=(*OF_EXPERTS, *PARTLY_TURNED, "use_qk_norm"),
        **NOAUX,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite",
        {"attention_bias": (LATENTS, OUT)},
        reads=(*OF_LATENTS, *OF_EXPERTS),
        **LATENT,
        **NOAUX,
    ),
    "Dots1ForCausalLM": Family("dots1", ATTENTION_BIAS, qk_norm=True, reads=OF_EXPERTS, **NOAUX),
    "SolarOpenForCausalLM": Family(
        "solar_open", {"attention_bias": (QKV,)}, windows="none", reads=OF_EXPERTS[1:], **NOAUX
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        windows="none",
        interleaved=True,
        sparse=True,
        router="statics",
        names=(("router_correction", "mlp.moe_statics"),),
    ),
    "Llama4ForCausalLM": Family(
        "llama4_text",
        ATTENTION_BIAS,
        interleaved=True,
        chunked=True,
        unturned="listed",
        sparse=True,
        router="inputs",
        reads=(
            "attention_chunk_size",
            "attn_temperature_tuning",
            "no_rope_layers",
            "use_qk_norm",
        ),
        names=(
            *((name, f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
            *(
                (f"shared_{name}", f"feed_forward.shared_expert.{name}_proj")
                for name in ("gate", "up", "down")
            ),
            ("router", "feed_forward.router"),
            *((f"experts_{name}", "feed_forward.experts") for name in ("gate_up", "down")),
        ),
    ),
    "YoutuForCausalLM": Family(
        "youtu", {"attention_bias": (LATENTS, OUT)}, reads=OF_LATENTS, **LATENT
    ),
    "Qwen3NextForCausalLM": Family("qwen3_next", sparse=True, shared=True, joined=True, **DELTA),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", **DELTA),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", sparse=True, shared=True, **DELTA),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", always=(QKV,), has_vision=True),
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl", ATTENTION_BIAS, windows="none", qk_norm=True, has_vision=True
    ),
}
# The language model of most multimodal checkpoints, in files and in memory.
ON_DISK, IN_MEMORY = "language_model.model", "model.language_model"
# Multimodal checkpoints by the names of their language models: model_type, and the language model's
# module in files and in memory.
MULTIMODAL = {
    "Gemma3": ("gemma3", ON_DISK, IN_MEMORY),
    "Gemma4": ("gemma4", IN_MEMORY, IN_MEMORY),
    "Gemma4Unified": ("gemma4_unified", IN_MEMORY, IN_MEMORY),
    "Mistral": ("mistral3", ON_DISK, IN_MEMORY),
    "Llama4": ("llama4", ON_DISK, ON_DISK),
    "Qwen3_5": ("qwen3_5", IN_MEMORY, IN_MEMORY),
    "Qwen3_5Moe": ("qwen3_5_moe", IN_MEMORY, IN_MEMORY),
}
for _stem, (_model_type, _module, _memory) in MULTIMODAL.items():
    _text = FAMILIES[f"{_stem}{CAUSAL}"]
    FAMILIES[f"{_stem}{'3' if _stem == 'Mistral' else ''}{CONDITIONAL}"] = replace(
        _text,
        model_type=_model_type,
        module=_module,
        memory=_memory,
        text_type=_text.model_type,
        has_vision=_model_type in SEEN,
    )
# Fields of other families that change what a model computes, with the values that change nothing.
# transformers ignores them in the families above; other programs may not.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_temperature_tuning": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "first_k_dense_replace": (),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (),
    "n_shared_experts": (),
    "no_rope_layers": (),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "rope_interleave": (),
    "routed_scaling_factor": (1,),
    "scale_emb": (1,),
    "use_qk_norm": (),
}
FOREIGN_BUT_TO_GEMMA = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)


@dataclass(frozen=True)
class ParsedConfig:
    """A model's config with all defaults."""

    family: Family

    whole: Any
    """transformers' own config object."""

    text: Any
    """Its part for the language model, or the same object."""


def parse_config(config: Mapping[str, Any]) -> ParsedConfig:
    """Parses a Hugging Face config.

    Raises: UserError for an unknown architecture, for fields that its family does not have, and for
    what transformers refuses.
    """
    family = family_of(config)
    of_text = config.get("text_config") or config
    foreign = FOREIGN | ({} if family.gemma else dict.fromkeys(FOREIGN_BUT_TO_GEMMA, ()))
    if not family.shared:
        foreign["shared_expert_intermediate_size"] = ()
    foreign = {name: values for name, values in foreign.items() if name not in family.reads}
    given = {name: part[name] for part in (config, of_text) for name in foreign if part.get(name)}
    refuse_features(
        {f"{name} = {value!r}": value not in foreign[name] for name, value in given.items()}
    )
    whole = parse_with_transformers(config, family)
    text = whole.get_text_config()
    refuse_features({f"a {text.model_type} inside": family.text_type not in ("", text.model_type)})
    return ParsedConfig(family, whole, text)


def family_of(config: Mapping[str, Any]) -> Family:
    given = (config.get("architectures") or ["none"])[0]
    model_type = config.get("model_type")
    wanted = stem(re.sub("TextFor(?=Sequence)", "For", given))
    known = [name for name in FAMILIES if stem(name) == wanted]
    # A text model and a multimodal one of the same language model have names of the same stem.
    name = next(
        (name for name in known if FAMILIES[name].model_type == model_type),
        known[0] if known else None,
    )
    if name is None:
        raise UserError(
            f"the JAX backend does not know the architecture {given}{with_parts(config)}; it knows"
            f" {', '.join(family.model_type for family in FAMILIES.values())} (the torch backend"
            " trains most causal language models of transformers)"
        )
    family = FAMILIES[name]
    multimodal = family.has_vision or bool(family.module)
    kinds = (CONDITIONAL if multimodal else CAUSAL, CLASSIFIER)
    if not given.endswith(kinds) or ("vision_config" in config and not multimodal):
        raise UserError(
            f"the JAX backend does not support {given} with images; of this family it trains {name}: "
            "save the language model alone under that name, or train another model"
        )
    if model_type != family.model_type:
        raise UserError(
            f"config.json has model_type = {model_type!r}, but the architecture {given} needs"
            f" {family.model_type!r}: correct it"
        )
    return family


def parse_with_transformers(config: Mapping[str, Any], family: Family) -> Any:
    from transformers import CONFIG_MAPPING

    # Like AutoConfig: a Mistral with differing layers uses the class of its successor.
    model_type = (
        "ministral"
        if family.model_type == "mistral" and "layer_types" in config
        else family.model_type
    )
    given = {**deepcopy(dict(config)), "model_type": model_type}
    # A flat config: not every class looks for the text's fields beside the tower's.
    if family.has_vision and "text_config" not in given:
        outside_text = ("vision_config", "architectures", "model_type")
        given["text_config"] = {
            name: value for name, value in given.items() if name not in outside_text
        }
        scaling = given["text_config"].get("rope_scaling") or {}
        if scaling.get("type") == "mrope":  # an older name for sections of an unscaled rotation
            kept = {name: value for name, value in scaling.items() if name != "type"}
            given["text_config"]["rope_scaling"] = {**kept, "rope_type": "default"}
    try:
        return CONFIG_MAPPING[model_type].from_dict(given)
    except (
        Exception
    ) as error:  # from field validation, and from arithmetic with what is not a number
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"transformers cannot read the model's config.json ({reason}): correct that field"
        ) from error


def refuse_features(
    features: Mapping[str, bool], instead: str = "use train.backend = 'torch'"
) -> None:
    """Raises: UserError for the first feature that the config requests."""
    for feature, asked in features.items():
        if asked:
            raise UserError(
                f"the JAX backend does not support {feature}, which the model's config requests:"
                f" {instead}"
            )
