"""Layers whose attention and MLPs have several shapes, as configs of Gemma 4 describe them.

    layers          queries                   keys and values                         MLP
    with a window   heads                     heads of their own                      plain
    full            heads of other widths     other heads; values may be the keys     plain
    the last ones   as others of their kind   those of the last layer of their kind   plain or twice
                                              that has any                            as wide

All of them divide values by their RMS and multiply what they return by a number of the layer, and
each may read an embedding of its own (areal_x_jax.layer_inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_x.errors import UserError
from areal_x_jax.families import ParsedConfig, refuse_features

STACKS = ("windowed", "full", "windowed_keys", "full_keys", "plain", "doubled")
FULL = "full_attention"
# Fields that layers of one kind may have values of their own of.
OF_KINDS = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True)
class VariedLayers:
    """The layers of each shape. Sizes of layers with a window are those of the architecture."""

    full: tuple[int, ...]
    """Layers with full attention."""

    head_dim: int
    """Features of a head in them."""

    kv_heads: int
    """Heads of keys and values in them."""

    keys_as_values: bool
    """True if their values are their keys before these are normalised and rotated."""

    sharing: tuple[int, ...] = ()
    """The last layers, which have no keys and values of their own (`source`)."""

    doubled: bool = False
    """True if the MLPs of these are twice as wide."""

    inputs: int = 0
    """Width of the embedding that each layer has of each token; 0 for none."""

    input_vocab: int = 0
    """Entries of these embeddings."""

    def source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer attends to: in most cases itself."""
        if layer not in self.sharing:
            return layer
        before = range(self.sharing[0])
        return max(i for i in before if (i in self.full) == (layer in self.full))

    def is_shared(self, layer: int) -> bool:
        """True if other layers attend to this one's keys and values."""
        return any(self.source(other) == layer for other in self.sharing if other != layer)

    def kind(self, layer: int) -> tuple[bool, bool, bool]:
        """Returns what a layer's program depends on: whether its attention is full, whether it has
        keys of its own, and whether other layers attend to them."""
        return layer in self.full, layer not in self.sharing, self.is_shared(layer)

    def layers_in(self, stack: str, layers: int) -> tuple[int, ...]:
        """Returns the layers of one of STACKS, of an architecture of this many layers."""
        shape, _, keys = stack.partition("_")
        of = {
            "windowed": set(range(layers)) - {*self.full},
            "full": {*self.full},
            "doubled": {*self.sharing} if self.doubled else set(),
        }
        of["plain"] = set(range(layers)) - of["doubled"]
        return tuple(sorted(of[shape] - {*(self.sharing if keys else ())}))

    def first(self, layers: int) -> VariedLayers:
        """Returns the first of these layers, none of which share keys."""
        return VariedLayers(
            tuple(i for i in self.full if i < layers),
            self.head_dim,
            self.kv_heads,
            self.keys_as_values,
            inputs=self.inputs,
            input_vocab=self.input_vocab,
        )


def varied_layers_of(described: ParsedConfig) -> VariedLayers | None:
    """Returns None for a family whose layers are alike.

    Raises: UserError for layers that transformers' model of the family cannot compute, or this
    backend does not.
    """
    text = described.text
    if not described.family.varied:
        return None
    kinds, layers = list(text.layer_types), text.num_hidden_layers
    first = max(layers - max(text.num_kv_shared_layers, 0), 0)
    alone = sorted(set(kinds[first:layers]) - set(kinds[:first]))
    if alone:
        raise UserError(
            f"config.json: num_kv_shared_layers = {text.num_kv_shared_layers} of {layers} layers leave"
            f" none of the kind {alone[0]} with keys and values that the others could share"
        )
    (full_dim, full_heads), _ = (heads_of_kind(text, kinds, full) for full in (True, False))
    # Gemma 4's 12B has none of these, nor experts.
    inputs = getattr(text, "hidden_size_per_layer_input", 0)
    vocab = getattr(text, "vocab_size_per_layer_input", 0)
    refuse_features(
        {
            f"vocab_size_per_layer_input = {vocab}, less than vocab_size = {text.vocab_size}": (
                bool(inputs) and vocab < text.vocab_size
            )
        },
        "correct its config.json",
    )
    return VariedLayers(
        full=tuple(i for i in range(layers) if kinds[i] == FULL),
        head_dim=full_dim,
        kv_heads=full_heads,
        keys_as_values=bool(text.attention_k_eq_v),
        sharing=tuple(range(first, layers)),
        doubled=bool(text.use_double_wide_mlp),
        inputs=inputs or 0,
        input_vocab=vocab if inputs else 0,
    )


def heads_of_kind(text: Any, kinds: Sequence[str], full: bool) -> tuple[int, int]:
    """Returns the features of a head, and the heads of keys and values, of layers with full attention
    or with a window; those of any layer if there are none of the kind.

    Raises: UserError for layers of one kind that differ, and for heads that cannot be grouped or
    rotated.
    """
    layers = text.num_hidden_layers
    own = [i for i in range(layers) if (kinds[i] == FULL) == full] or [0]
    configs = [text.per_layer_config[i] for i in own]
    found = {(config.head_dim, config.num_key_value_heads) for config in configs}
    others = ", ".join(sorted({*(text.per_layer_attributes or ())} - OF_KINDS))
    refuse_features(
        {
            f"per_layer_config with {others}": bool(others),
            "per_layer_config with parts to skip": any(getattr(x, "skip", ()) for x in configs),
            f"heads of several shapes in layers of the kind {kinds[own[0]]}": len(found) > 1,
        },
        "correct its config.json",
    )
    ((head_dim, kv_heads),) = found
    if text.num_attention_heads % kv_heads:
        raise UserError(
            f"config.json: num_key_value_heads = {kv_heads} of layers of the kind {kinds[own[0]]} does"
            f" not divide num_attention_heads = {text.num_attention_heads}"
        )
    if head_dim % 2:
        raise UserError(
            f"config.json: head_dim = {head_dim} of layers of the kind {kinds[own[0]]} is odd, so that"
            " its features cannot be rotated in pairs"
        )
    return head_dim, kv_heads
