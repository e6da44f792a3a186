"""The architecture of a vision tower, and how a decoder uses its output: read from a Hugging Face
config.

What differs between families is a field, never a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x_jax.families import parse_config, refuse_features

# Modules of the decoder's and the tower's tensors in what transformers saves. The hub also has models
# of each family under the names of the other.
MODULES = {"qwen2_5_vl": ("model", "visual"), "qwen3_vl": ("model.language_model", "model.visual")}


@dataclass(frozen=True)
class VisionArchitecture:
    """Sizes and features of a vision tower."""

    family: str
    """Family whose names the tensors have; used for nothing else."""

    patch: tuple[int, int, int, int]
    """Size of a patch: (channels, frames, height, width)."""

    patch_bias: bool

    merge: int
    """merge² neighbouring patches become one embedding of `out` features."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    out: int
    rope_theta: float

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

    @property
    def in_features(self) -> int:
        return int(np.prod(self.patch))

    @property
    def host_view(self) -> tuple[object, ...]:
        """Everything that the host reads: towers that agree in this take the same arrays."""
        return self.patch, self.merge, self.window, self.table, self.image_token


def read_vision_architecture(config: Mapping[str, Any]) -> VisionArchitecture:
    """Reads the vision tower of a Hugging Face config.

    Raises: UserError naming what this tower does not support.
    """
    described = parse_config(config)
    whole, text, vision = described.whole, described.text, described.whole.vision_config
    family = described.family.model_type
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
