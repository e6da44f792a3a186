"""The architecture of a vision tower, and how a decoder uses its output: read from a Hugging Face
config.

What differs between families is a field, never a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from areal_x.errors import UserError
from areal_x.hf.image_format import SQUARE, ImageFormat, divides, format_of
from areal_x_jax.families import ParsedConfig, parse_config, refuse_features

# Modules of the decoder's and the tower's tensors in what transformers saves. The hub also has models
# of each family under the names of the other.
MODULES = {"qwen2_5_vl": ("model", "visual"), "qwen3_vl": ("model.language_model", "model.visual")}
# Of Gemma 3's tower: transformers since 5, and the hub.
SIGLIP_MODULES = ("vision_tower", "vision_tower.vision_model")
PROJECTOR = "multi_modal_projector"


@dataclass(frozen=True)
class VisionArchitecture:
    """Sizes and features of a vision tower."""

    family: str
    """Family whose names the tensors have; used for nothing else."""

    module: str
    """Module of the tower's tensors in files."""

    patch: tuple[int, ...]
    """Size of a patch: (channels, frames, height, width), or without frames."""

    patch_bias: bool

    merge: int
    """merge² neighbouring patches become one embedding of `out` features."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    out: int
    rope_theta: float
    """0 if the tower's queries and keys are not rotated."""

    gated_mlp: bool
    """True if the MLP is gated by silu, False if it is plain, with gelu by tanh."""

    layer_norm: bool
    """True for layer norms with a bias, False for RMS norms."""

    window: int
    """Side of an attention window in patches; 0 for none."""

    full_layers: tuple[int, ...]
    """Layers that attend to the whole frame nevertheless."""

    table: int
    """Side of the learned table of positions; 0 for none."""

    deepstack: tuple[int, ...]
    """Layers whose outputs are merged as well; each is added to the output of one of the decoder's
    first layers."""

    image_token: int
    """Id of the tokens that image embeddings replace."""

    sections: tuple[int, ...]
    """Numbers of a head's angles that follow time, height and width (`vision.multimodal_rotation`)."""

    interleaved: bool
    """True if those angles are interleaved."""

    eps: float = 1e-6
    """Of every norm; Qwen's config does not hold it."""

    side: int = 0
    """Patches along each side of every image; 0 if images differ in size. Then the mean of merge²
    neighbours is projected, positions are those of text, and the tokens of an image see each other."""

    @property
    def form(self) -> ImageFormat:
        return ImageFormat(self.image_token, self.merge, self.patch, self.side)

    @property
    def in_features(self) -> int:
        return self.form.features

    @property
    def host_view(self) -> tuple[object, ...]:
        """Everything that the host reads: towers that agree in this take the same arrays."""
        return self.patch, self.merge, self.window, self.table, self.image_token, self.side


def read_vision_architecture(config: Mapping[str, Any]) -> VisionArchitecture | None:
    """Reads the vision tower of a Hugging Face config; None if it can make no tokens of images
    (`image_format.divides`), so that the language model alone is trained.

    Raises: UserError naming what this tower does not support.
    """
    described = parse_config(config)
    whole, text, vision = described.whole, described.text, described.whole.vision_config
    family = described.family.model_type
    if family in SQUARE:
        return read_siglip(described) if divides(described.whole) else None
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
        patch=(vision.in_channels, vision.temporal_patch_size, size, size),
        patch_bias=qwen3,
        merge=merge,
        hidden=vision.hidden_size,
        layers=vision.depth,
        heads=vision.num_heads,
        intermediate=vision.intermediate_size,
        out=vision.out_hidden_size,
        rope_theta=float(rope["rope_theta"]),
        gated_mlp=not qwen3,
        layer_norm=qwen3,
        window=vision.window_size // merge // size * merge if not qwen3 else 0,
        full_layers=tuple(vision.fullatt_block_indexes) if not qwen3 else (),
        table=isqrt(vision.num_position_embeddings) if qwen3 else 0,
        deepstack=deepstack,
        image_token=whole.image_token_id,
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
    if vision.hidden_size % vision.num_attention_heads:
        raise UserError(
            f"config.json: num_attention_heads = {vision.num_attention_heads} of the vision tower do"
            f" not divide its hidden_size = {vision.hidden_size}"
        )
    return VisionArchitecture(
        family=described.family.model_type,
        module=SIGLIP_MODULES[0],
        patch=form.patch,
        patch_bias=True,
        merge=form.merge,
        hidden=vision.hidden_size,
        layers=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        out=described.text.hidden_size,
        rope_theta=0.0,
        gated_mlp=False,
        layer_norm=True,
        window=0,
        full_layers=(),
        table=form.side,
        deepstack=(),
        image_token=form.token,
        sections=(),
        interleaved=False,
        eps=float(vision.layer_norm_eps),
        side=form.side,
    )
