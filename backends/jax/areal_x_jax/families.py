"""The model families that the JAX backend supports, and their configs as transformers reads them.

A field missing from config.json has the default of transformers' configuration class, which also
translates older spellings (rope_scaling, flat configs of vision-language models): no default is
repeated here. Families differ in fields, not in classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from areal_x.errors import UserError
from areal_x.hf.model_dir import CAUSAL, CLASSIFIER, CONDITIONAL, stem

QKV, OUT, MLP = (
    "biases of queries, keys and values",
    "a bias of the attention's output",
    "biases in the MLP",
)
ATTENTION_BIAS = {"attention_bias": (QKV, OUT)}


@dataclass(frozen=True)
class Family:
    """Features of a model family."""

    model_type: str
    """Hugging Face's model_type."""

    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Which of QKV, OUT and MLP a field of the config switches on."""

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

    has_vision: bool = False
    """True for vision-language models."""


FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", ATTENTION_BIAS, qk_norm=True),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", ATTENTION_BIAS, windows="all", qk_norm=True, sparse=True
    ),
    "Qwen2ForCausalLM": Family("qwen2", always=(QKV,)),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", {"qkv_bias": (QKV,)}, sparse=True, shared=True),
    "LlamaForCausalLM": Family("llama", {**ATTENTION_BIAS, "mlp_bias": (MLP,)}, windows="none"),
    "MistralForCausalLM": Family("mistral", windows="all"),
    "Gemma3ForCausalLM": Family("gemma3_text", ATTENTION_BIAS, qk_norm=True, gemma=True),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", always=(QKV,), has_vision=True),
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl", ATTENTION_BIAS, windows="none", qk_norm=True, has_vision=True
    ),
}
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
    given = {name: part[name] for part in (config, of_text) for name in foreign if part.get(name)}
    refuse_features(
        {f"{name} = {value!r}": value not in foreign[name] for name, value in given.items()}
    )
    whole = parse_with_transformers(config, family)
    return ParsedConfig(family, whole, whole.get_text_config())


def family_of(config: Mapping[str, Any]) -> Family:
    given = (config.get("architectures") or ["none"])[0]
    name = next(
        (known for known in FAMILIES if stem(known) == stem(given.replace("3TextFor", "3For"))),
        None,
    )
    if name is None:
        raise UserError(
            f"the JAX backend does not know the architecture {given}; it knows"
            f" {', '.join(FAMILIES)} (the torch backend trains most causal language models of"
            " transformers)"
        )
    family, kinds = (
        FAMILIES[name],
        (CONDITIONAL if FAMILIES[name].has_vision else CAUSAL, CLASSIFIER),
    )
    if not given.endswith(kinds) or ("vision_config" in config and not family.has_vision):
        raise UserError(
            f"the JAX backend does not support {given} with images; of this family it trains {name}: "
            "save the language model alone under that name, or train another model"
        )
    model_type = config.get("model_type")
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
