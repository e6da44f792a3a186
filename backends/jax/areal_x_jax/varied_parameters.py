"""The parameters of layers of several shapes (areal_x_jax.varied_layers), and of what they have
beside those of other families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from areal_x_jax.architecture import Architecture
from areal_x_jax.leaf import Leaf

KEYS = ("k", "v", "k_norm", "k_bias", "v_bias")
FULL_AXES = {x: f"full_{x}" for x in ("query", "key", "attended", "head_dim")}
DOUBLED_AXES = {"intermediate": "doubled_intermediate"}


def varied_leaves(arch: Architecture, alike: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Returns the parameters of layers. alike: what they would be if all had the shape of those with a
    window."""
    assert arch.varied is not None
    found = {}
    for name, leaf in alike.items():
        if leaf.name.startswith("self_attn."):
            keys = "_keys" if name in KEYS else ""
            found[name] = replace(leaf, stack=f"windowed{keys}")
            if not (arch.varied.keys_as_values and name in ("v", "v_bias")):
                found[f"full_{name}"] = _reshaped(leaf, FULL_AXES, f"full{keys}")
        elif leaf.name.startswith("mlp."):
            found[name] = replace(leaf, stack="plain")
            found[f"doubled_{name}"] = _reshaped(leaf, DOUBLED_AXES, "doubled")
        else:
            found[name] = leaf
    found["layer_scalar"] = Leaf("layer_scalar", ("one",))
    if arch.varied.inputs:
        found |= {
            "inputs_gate": Leaf("per_layer_input_gate.weight", ("hidden", "input_width")),
            "inputs_projection": Leaf("per_layer_projection.weight", ("input_width", "hidden")),
            "inputs_norm": Leaf("post_per_layer_input_norm.weight", ("hidden",)),
        }
    return {name: leaf for name, leaf in found.items() if arch.layers_in(leaf.stack)}


def _reshaped(leaf: Leaf, axes: Mapping[str, str], stack: str) -> Leaf:
    return replace(leaf, axes=tuple(axes.get(axis, axis) for axis in leaf.axes), stack=stack)


def mixture_beside() -> dict[str, Leaf]:
    """Returns the parameters of experts beside each MLP (`Experts.beside`)."""
    gate_up = "experts", "hidden", "expert_gate_and_up"
    down = "experts", "expert_intermediate", "hidden"
    return {
        "router": Leaf("router.proj.weight", ("hidden", "experts")),
        "router_scale": Leaf("router.scale", ("hidden",)),
        "expert_scale": Leaf("router.per_expert_scale", ("expert_scales",)),
        "experts_gate_up": Leaf("experts.gate_up_proj", gate_up, outputs_first=True),
        "experts_down": Leaf("experts.down_proj", down, outputs_first=True),
        "plain_out_norm": Leaf("post_feedforward_layernorm_1.weight", ("hidden",)),
        "mixture_norm": Leaf("pre_feedforward_layernorm_2.weight", ("hidden",)),
        "mixture_out_norm": Leaf("post_feedforward_layernorm_2.weight", ("hidden",)),
    }


def input_leaves(arch: Architecture, module: str) -> dict[str, Leaf]:
    """Returns the parameters outside of layers that make their inputs (areal_x_jax.layer_inputs)."""
    if arch.varied is None or not arch.varied.inputs:
        return {}
    table, kernel = ("input_vocab", "table_width"), ("hidden", "all_inputs")
    return {
        "embed_inputs": Leaf(f"{module}.embed_tokens_per_layer.weight", table),
        "inputs_projection": Leaf(f"{module}.per_layer_model_projection.weight", kernel),
        "inputs_norm": Leaf(f"{module}.per_layer_projection_norm.weight", ("input_width",)),
    }


def varied_sizes(arch: Architecture) -> dict[str, int]:
    """Returns the lengths of the axes of these parameters."""
    varied = arch.varied
    if varied is None:
        return {}
    return {
        "full_query": arch.heads * varied.head_dim,
        "full_attended": arch.heads * varied.head_dim,
        "full_key": varied.kv_heads * varied.head_dim,
        "full_head_dim": varied.head_dim,
        "doubled_intermediate": 2 * arch.intermediate,
        "expert_scales": arch.experts.count if arch.experts else 0,
        "input_width": varied.inputs,
        "input_vocab": varied.input_vocab,
        "table_width": arch.layers * varied.inputs,
        "all_inputs": arch.layers * varied.inputs,
    }


def is_unused(arch: Architecture, layers: str, name: str) -> bool:
    """True for keys and values of layers that attend to those of others: checkpoints of the hub have
    them, and transformers reads and writes none. layers: the name of the layers' module."""
    if arch.varied is None or arch.adapters is not None:
        return False
    parts = "k_proj", "v_proj", "k_norm", "v_norm"
    unused = (f"{layers}.{i}.self_attn.{x}." for i in arch.varied.sharing for x in parts)
    return name.startswith(tuple(unused))
