"""The decoder's parameters: one table of their names, here and at Hugging Face, and of what each of their axes is.

Sizes, shardings (see areal_x_jax.layout) and the way in and out of safetensors follow from it. Kernels are stored [in, out],
the transpose of Hugging Face's, and layers stacked on a leading axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from areal_x.lora import WRAPPED
from areal_x_jax.shape import MLP, OUT, QKV, Shape

Params = dict[str, Any]


@dataclass(frozen=True)
class Leaf:
    """name: Hugging Face's, {expert} standing for a number. axes: what each is, as stored, without that of layers."""

    name: str
    axes: tuple[str, ...]

    @property
    def transposed(self) -> bool:
        return len(self.axes) > 1 and self.axes[0] != "vocab"


def in_layers(shape: Shape) -> dict[str, Leaf]:
    """What each layer has."""
    if shape.adapters is not None:
        return beside(shape, shape.adapters.kernels)
    found = {
        "input_norm": Leaf("input_layernorm.weight", ("hidden",)),
        "mlp_norm": Leaf(f"{'pre_feedforward' if shape.out_norms else 'post_attention'}_layernorm.weight", ("hidden",)),
        "q": Leaf("self_attn.q_proj.weight", ("hidden", "query")),
        "k": Leaf("self_attn.k_proj.weight", ("hidden", "key")),
        "v": Leaf("self_attn.v_proj.weight", ("hidden", "key")),
        "o": Leaf("self_attn.o_proj.weight", ("query", "hidden")),
    }
    if QKV in shape.biases:
        found |= {f"{x}_bias": Leaf(f"self_attn.{x}_proj.bias", ("query" if x == "q" else "key",)) for x in "qkv"}
    if OUT in shape.biases:
        found["o_bias"] = Leaf("self_attn.o_proj.bias", ("hidden",))
    if shape.qk_norm:
        found |= {f"{x}_norm": Leaf(f"self_attn.{x}_norm.weight", ("head_dim",)) for x in "qk"}
    if shape.out_norms:
        found["attention_out_norm"] = Leaf("post_attention_layernorm.weight", ("hidden",))
        found["mlp_out_norm"] = Leaf("post_feedforward_layernorm.weight", ("hidden",))
    if shape.experts is None:
        return found | mlp("", "mlp", "intermediate", MLP in shape.biases)
    found["router"] = Leaf("mlp.gate.weight", ("hidden", "experts"))
    one = mlp("", "mlp.experts.{expert}", "expert_intermediate", False)
    found |= {f"experts_{name}": Leaf(leaf.name, ("experts", *leaf.axes)) for name, leaf in one.items()}
    if shape.experts.shared:
        found |= mlp("shared_", "mlp.shared_expert", "shared_intermediate", False)
        found["shared_router"] = Leaf("mlp.shared_expert_gate.weight", ("hidden", "one"))
    return found


def adaptable(shape: Shape) -> tuple[str, ...]:
    """The kernels that adapters can stand beside. Experts and their routers have none."""
    return ("q", "k", "v", "o") + (() if shape.experts else ("gate", "up", "down"))


def beside(shape: Shape, kernels: Iterable[str]) -> dict[str, Leaf]:
    """The adapters of these kernels under PEFT's names: q_lora_a [hidden, rank] and q_lora_b [rank, query] of q."""
    decoder, found = in_layers(replace(shape, adapters=None)), {}
    for kernel in kernels:
        module, (into, out) = decoder[kernel].name.removesuffix(".weight"), decoder[kernel].axes
        found[f"{kernel}_lora_a"] = Leaf(f"{module}.lora_A.weight", (into, "rank"))
        found[f"{kernel}_lora_b"] = Leaf(f"{module}.lora_B.weight", ("rank", out))
    return found


def mlp(prefix: str, module: str, width: str, biases: bool) -> dict[str, Leaf]:
    axes = {"gate": ("hidden", width), "up": ("hidden", width), "down": (width, "hidden")}
    found = {f"{prefix}{name}": Leaf(f"{module}.{name}_proj.weight", own) for name, own in axes.items()}
    if biases:
        found |= {f"{prefix}{name}_bias": Leaf(f"{module}.{name}_proj.bias", own[1:]) for name, own in axes.items()}
    return found


def outside_layers(shape: Shape) -> dict[str, Leaf]:
    if shape.adapters is not None:
        return {"score": Leaf(f"{WRAPPED}score.weight", ("hidden", "one"))} if shape.scores else {}
    found = {"embed": Leaf("model.embed_tokens.weight", ("vocab", "hidden")), "norm": Leaf("model.norm.weight", ("hidden",))}
    if shape.scores:
        found["score"] = Leaf("score.weight", ("hidden", "one"))
    elif not shape.tied:
        found["head"] = Leaf("lm_head.weight", ("hidden", "vocab"))
    return found


def sizes_of(shape: Shape) -> dict[str, int]:
    """How long each kind of axis is."""
    experts = shape.experts
    return {
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "query": shape.heads * shape.head_dim,
        "key": shape.kv_heads * shape.head_dim,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate,
        "experts": experts.count if experts else 0,
        "expert_intermediate": experts.intermediate if experts else 0,
        "shared_intermediate": experts.shared if experts else 0,
        "layers": shape.layers,
        "rank": shape.adapters.rank if shape.adapters else 0,
        "one": 1,
    }


def axes_of(shape: Shape) -> Params:
    """The tree of parameters with the kinds of their axes, as tuples, in place of arrays."""
    layers = {name: ("layers", *leaf.axes) for name, leaf in in_layers(shape).items()}
    return {**{name: leaf.axes for name, leaf in outside_layers(shape).items()}, "layers": layers}


class Parameters(nnx.Module):
    """Some parameters of fp32 zeros, each under its name."""

    def __init__(self, axes: dict[str, tuple[str, ...]], sizes: dict[str, int]) -> None:
        for name, own in axes.items():
            setattr(self, name, nnx.Param(jnp.zeros([sizes[axis] for axis in own], jnp.float32)))


class Decoder(Parameters):
    """embed [vocab, hidden], norm [hidden], layers (stacked: every leaf begins with the axis of layers), and score [hidden, 1]
    or, unless it is tied, head [hidden, vocab]. Of adapters: their layers, and the score."""

    def __init__(self, shape: Shape) -> None:
        axes, sizes = axes_of(shape), sizes_of(shape)
        super().__init__({name: own for name, own in axes.items() if name != "layers"}, sizes)
        self.layers = Parameters(axes["layers"], sizes)


def parameter_shapes(shape: Shape) -> Params:
    """The tree of parameters as shapes and dtypes, without allocating any."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(shape)), nnx.Param))
