"""The architecture of a vision tower, and how a decoder uses its output
(areal_x_jax.vision_families reads it from a Hugging Face config).

What differs between families is a field, never a subclass.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_x.hf.image_format import ImageFormat

# Modules of the decoder's and the tower's tensors in what transformers saves. The hub also has models
# of each family under the names of the other.
MODULES = {"qwen2_5_vl": ("model", "visual"), "qwen3_vl": ("model.language_model", "model.visual")}
# Of Gemma 3's tower: transformers since 5, and the hub. Mistral 3's has the first on both.
TOWER_MODULES = ("vision_tower", "vision_tower.vision_model")


@dataclass(frozen=True)
class VisionArchitecture:
    """Sizes and features of a vision tower."""

    family: str
    """Family whose names the tensors have; used for nothing else."""

    module: str
    """Module of the tower's tensors in files."""

    form: ImageFormat
    """How the model takes images."""

    patch_bias: bool
    hidden: int
    layers: int
    heads: int
    intermediate: int
    out: int
    rope_theta: float
    """0 if the tower's queries and keys are not rotated."""

    gated_mlp: bool
    activation: str
    """Of the MLP, in `layer_parts.ACTIVATIONS`."""

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

    sections: tuple[int, ...]
    """Numbers of a head's angles that follow time, height and width (`vision.multimodal_rotation`); ()
    if positions are those of text."""

    interleaved: bool
    """True if those angles are interleaved."""

    merger: str = "joined"
    """How merge² neighbours become an embedding, by areal_x_jax.mergers: "joined" (`merge`), "mean"
    (`pool`), "mixed" (`mix`), "scaled" (`scale_means`) or "shuffled" (`shuffle`)."""

    eps: float = 1e-6
    """Of every norm; Qwen's config does not hold it."""

    merger_eps: float = 1e-6
    """Of the merger's norm."""

    kernel_bias: bool = True
    """True if the kernels of layers and merger have biases."""

    merger_bias: bool = True

    pre_norm: bool = False
    """True if embedded patches are normalised before the first layer."""

    turned: str = "halves"
    """How a head's features turn (`vision.patch_rotation`): "halves", "alternating", "quarters"
    or "neighbours"."""

    kv_heads: int = 0
    """Heads of keys and values; 0 for as many as queries have."""

    head_features: int = 0
    """Features of a head; 0 if heads make up the width."""

    qk_norm: bool = False
    """True if each head's query, key and value are normalised, and scores not scaled."""

    out_norms: bool = False
    """True if the outputs of attention and MLP are normalised before they are added."""

    axis_table: int = 0
    """Length of the learned tables of columns and of rows; 0 for none."""

    patch_norms: bool = False
    """True if patches are normalised, and again once embedded and once placed."""

    from_zero: bool = False
    """True if the pixels of patches are from 0 to 1, and those that the tower embeds from −1 to 1."""

    clipped: bool = False
    """True if what the kernels of layers read and give is clipped (`vision.apply`)."""

    convolved: bool = True
    """True if files have the kernel of patches as that of a convolution."""

    classed: bool = False
    """True if a token without a place stands beside the patches of each image."""

    adapted: int = 0
    """Width between the tower and the projector of a merger that is "shuffled"."""

    standardized: bool = False
    """True if means of neighbours are standardised before they are projected."""

    @property
    def head_dim(self) -> int:
        return self.head_features or self.hidden // self.heads

    @property
    def merge(self) -> int:
        return self.form.merge

    @property
    def image_token(self) -> int:
        return self.form.token

    @property
    def in_features(self) -> int:
        return self.form.features

    @property
    def host_view(self) -> tuple[object, ...]:
        """Everything that the host reads: towers that agree in this take the same arrays."""
        return self.form, self.window, self.table
