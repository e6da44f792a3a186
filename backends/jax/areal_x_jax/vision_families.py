"""The vision towers of families, read from their Hugging Face configs."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from areal_x.errors import UserError
from areal_x.hf.image_format import format_of, takes_images
from areal_x_jax.families import ParsedConfig, parse_config, refuse_features
from areal_x_jax.vision_architecture import MODULES, TOWER_MODULES, VisionArchitecture

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


def read_vision_architecture(config: Mapping[str, Any]) -> VisionArchitecture | None:
    """Reads the vision tower of a Hugging Face config; None if it can make no tokens of images
    (`image_format.divides`), so that the language model alone is trained.

    Raises: UserError naming what this tower does not support.
    """
    described = parse_config(config)
    whole, text, vision = described.whole, described.text, described.whole.vision_config
    family = described.family.model_type
    if not takes_images(described.whole):
        return None
    if family in READERS:
        return READERS[family](described)
    qwen3 = family == "qwen3_vl"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sections = text.rope_parameters.get("mrope_section", [24, 20, 20] if qwen3 else [16, 24, 24])
    if sum(sections) != head_dim // 2:
        raise UserError(
            f"mrope_section = {sections} of the model's config must add up to head_dim / 2 ="
            f" {head_dim // 2}"
        )
    interleaved = text.rope_parameters.get("mrope_interleaved", qwen3)
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (vision.rope_parameters or {})
    deepstack = tuple(vision.deepstack_visual_indexes) if qwen3 else ()
    known, sides = (
        "gelu_pytorch_tanh" if qwen3 else "silu",
        (vision.patch_size, vision.temporal_patch_size),
    )
    refuse_features(
        {
            f"the activation {vision.hidden_act!r} of the vision tower": vision.hidden_act != known,
            f"mrope_interleaved = {interleaved}": interleaved != qwen3,
            f"patches of {sides}": not all(isinstance(side, int) for side in sides),
            f"{rope} in the vision tower": (
                rope["rope_type"] not in ("default", "axial") or len(rope) > 2
            ),
        }
    )
    if list(deepstack) != sorted(set(deepstack)):
        raise UserError(
            f"deepstack_visual_indexes = {list(deepstack)}: the JAX backend wants them in ascending"
            " order"
        )
    size, merge = vision.patch_size, vision.spatial_merge_size
    return VisionArchitecture(
        family=family,
        module=MODULES[family][1],
        form=format_of(whole),
        patch_bias=qwen3,
        hidden=vision.hidden_size,
        layers=vision.depth,
        heads=vision.num_heads,
        intermediate=vision.intermediate_size,
        out=vision.out_hidden_size,
        rope_theta=float(rope["rope_theta"]),
        gated_mlp=not qwen3,
        activation=ACTIVATIONS[known],
        layer_norm=qwen3,
        window=vision.window_size // merge // size * merge if not qwen3 else 0,
        full_layers=tuple(vision.fullatt_block_indexes) if not qwen3 else (),
        table=isqrt(vision.num_position_embeddings) if qwen3 else 0,
        deepstack=deepstack,
        sections=tuple(sections),
        interleaved=qwen3,
    )


def read_siglip(described: ParsedConfig) -> VisionArchitecture:
    """Reads Gemma 3's tower and projector. Raises as `read_vision_architecture`."""
    whole, vision = described.whole, described.whole.vision_config
    form = format_of(whole)
    refuse_features(
        {
            f"a {vision.model_type} as vision tower": vision.model_type != "siglip_vision_model",
            f"the activation {vision.hidden_act!r} of the vision tower": (
                vision.hidden_act != "gelu_pytorch_tanh"
            ),
        }
    )
    check_heads(vision)
    return VisionArchitecture(
        family=described.family.model_type,
        module=TOWER_MODULES[0],
        form=form,
        patch_bias=True,
        hidden=vision.hidden_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        out=described.text.hidden_size,
        rope_theta=0.0,
        gated_mlp=False,
        activation="gelu_tanh",
        layer_norm=True,
        window=0,
        full_layers=(),
        table=form.side,
        deepstack=(),
        sections=(),
        interleaved=False,
        merger="mean",
        eps=float(vision.layer_norm_eps),
        merger_eps=float(vision.layer_norm_eps),
    )


def read_pixtral(described: ParsedConfig) -> VisionArchitecture:
    """Reads Mistral 3's tower and projector. Raises as `read_vision_architecture`."""
    whole, vision = described.whole, described.whole.vision_config
    layer, projected = whole.vision_feature_layer, whole.projector_hidden_act
    rope = vision.rope_parameters
    refuse_features(
        {
            f"a {vision.model_type} as vision tower": vision.model_type != "pixtral",
            f"the activation {vision.hidden_act!r} of the vision tower": (
                vision.hidden_act not in ACTIVATIONS
            ),
            f"the activation {projected!r} of the projector": projected != "gelu",
            f"vision_feature_layer = {layer}": layer != -1,
            f"patches of {vision.patch_size}": not isinstance(vision.patch_size, int),
            f"{rope} in the vision tower": rope["rope_type"] != "axial" or len(rope) > 2,
        }
    )
    check_heads(vision, 4)
    return VisionArchitecture(
        family=described.family.model_type,
        module=TOWER_MODULES[0],
        form=format_of(whole),
        patch_bias=False,
        hidden=vision.hidden_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        out=described.text.hidden_size,
        rope_theta=float(rope["rope_theta"]),
        gated_mlp=True,
        activation=ACTIVATIONS[vision.hidden_act],
        layer_norm=False,
        window=0,
        full_layers=(),
        table=0,
        deepstack=(),
        sections=(),
        interleaved=False,
        merger="mixed",
        eps=1e-5,  # which transformers' tower has for every config
        merger_eps=float(described.text.rms_norm_eps),
        kernel_bias=False,
        merger_bias=bool(whole.multimodal_projector_bias),
        pre_norm=True,
        turned="alternating",
    )


def read_placed(described: ParsedConfig) -> VisionArchitecture:
    """Reads Gemma 4's tower, or what its 12B has in place of one. Raises as `read_vision_architecture`."""
    whole, vision = described.whole, described.whole.vision_config
    common: dict[str, Any] = {
        "family": described.family.model_type,
        "form": format_of(whole),
        "out": described.text.hidden_size,
        **dict.fromkeys(("window", "table"), 0),
        **dict.fromkeys(("full_layers", "deepstack", "sections"), ()),
        "interleaved": False,
        "merger": "scaled",
        "convolved": False,
        "merger_eps": float(vision.rms_norm_eps),
        "merger_bias": False,
        "activation": "gelu_tanh",
    }
    if described.family.model_type == "gemma4_unified":
        width = vision.mm_embed_dim
        refuse_features(
            {f"output_proj_dims = {vision.output_proj_dims}": vision.output_proj_dims != width}
        )
        return VisionArchitecture(
            module="model.vision_embedder",
            patch_bias=True,
            hidden=width,
            layers=0,
            heads=1,
            intermediate=0,
            rope_theta=0.0,
            gated_mlp=False,
            layer_norm=True,
            axis_table=vision.mm_posemb_size,
            patch_norms=True,
            eps=1e-5,
            **common,
        )
    rope, activation = vision.rope_parameters, vision.hidden_activation
    refuse_features(
        {
            f"the activation {activation!r} of the vision tower": activation not in ACTIVATIONS,
            f"{rope} in the vision tower": rope["rope_type"] != "axial" or len(rope) > 2,
            f"heads of {vision.head_dim} features in the vision tower": vision.head_dim % 4 > 0,
        }
    )
    common["activation"] = ACTIVATIONS[activation]
    return VisionArchitecture(
        module="model.vision_tower",
        patch_bias=False,
        hidden=vision.hidden_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        rope_theta=float(rope["rope_theta"]),
        gated_mlp=True,
        layer_norm=False,
        eps=float(vision.rms_norm_eps),
        kernel_bias=False,
        turned="quarters",
        kv_heads=vision.num_key_value_heads,
        head_features=vision.head_dim,
        qk_norm=True,
        out_norms=True,
        axis_table=vision.position_embedding_size,
        from_zero=True,
        clipped=bool(vision.use_clipped_linears),
        standardized=bool(vision.standardize),
        **common,
    )


def check_heads(vision: Any, parts: int = 1) -> None:
    """Raises: UserError for heads of a tower that do not make up its width, or with features that are not
    a multiple of `parts`."""
    hidden, heads = vision.hidden_size, vision.num_attention_heads
    if hidden % (heads * parts):
        of = f" in heads of a multiple of {parts} features" if parts > 1 else ""
        raise UserError(
            f"config.json: num_attention_heads = {heads} of the vision tower do not divide its"
            f" hidden_size = {hidden}{of}"
        )


def read_tiles(described: ParsedConfig) -> VisionArchitecture:
    """Reads Llama 4's tower, adapter and projector. Raises as `read_vision_architecture`."""
    whole, vision = described.whole, described.whole.vision_config
    form, rope = format_of(whole), vision.rope_parameters
    refuse_features(
        {
            f"a projector_dropout of {vision.projector_dropout}": vision.projector_dropout > 0,
            f"{rope} in the vision tower": rope["rope_type"] not in ("default", "axial"),
        }
    )
    check_heads(vision, 4)
    return VisionArchitecture(
        family=described.family.model_type,
        module="vision_model",
        form=form,
        patch_bias=False,
        hidden=vision.hidden_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        out=described.text.hidden_size,
        rope_theta=float(rope["rope_theta"]),
        gated_mlp=False,
        activation="gelu",  # whatever the config names
        layer_norm=True,
        window=0,
        full_layers=(),
        table=form.side,
        deepstack=(),
        sections=(),
        interleaved=False,
        merger="shuffled",
        eps=1e-5,  # torch's for layer norms
        merger_bias=False,
        pre_norm=True,
        turned="neighbours",
        convolved=False,
        classed=True,
        adapted=vision.projector_output_dim,
    )


READERS = {
    "gemma3": read_siglip,
    "mistral3": read_pixtral,
    "gemma4": read_placed,
    "gemma4_unified": read_placed,
    "llama4": read_tiles,
}
