"""The decoder's parameters: one table of their names, here and at Hugging Face, and of the kind of
each of their axes.

Sizes, shardings (areal_x_jax.sharding) and conversion from and to safetensors follow from it.
Kernels are stored [in, out], the transpose of Hugging Face's, and layers are stacked on a leading
axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from areal_x.hf.adapters import PEFT_PREFIX, expert_module
from areal_x.protocols.trainer_config import EXPERTS
from areal_x_jax.architecture import STACKS, Architecture
from areal_x_jax.delta_rule import DeltaRule
from areal_x_jax.families import LATENTS, MLP, ON_DISK, OUT, QKV
from areal_x_jax.leaf import Leaf, local_name, mlp
from areal_x_jax.varied_parameters import (
    input_leaves,
    mixture_beside,
    varied_leaves,
    varied_sizes,
)
from areal_x_jax.vision_architecture import MODULES
from areal_x_jax.vision_parameters import stack_of, vision_axis_sizes, vision_leaves

Params = dict[str, Any]

# Leaves that no optimizer changes: what a router chooses experts by is exact, and moves by
# trainer.balance_rate alone; a factor of a layer's output stays as it was loaded. Both are buffers in
# transformers, as are what a tower's kernels are clipped by and its means standardised with.
FIXED = ("router_correction", "layer_scalar", "bounds", "std_bias", "std_scale")
# Leaves that are fp32 in any compute precision.
EXACT = ("score", *FIXED)


def layer_leaves(arch: Architecture) -> dict[str, Leaf]:
    """Returns the parameters of layers."""
    if arch.adapters is not None:
        return adapter_leaves(arch, arch.adapters.kernels)
    found = {}
    if arch.in_norms:
        found["input_norm"] = Leaf("input_layernorm.weight", ("hidden",))
        if not arch.parallel:
            found["mlp_norm"] = Leaf("post_attention_layernorm.weight", ("hidden",))
    if arch.latent is not None:
        found |= latent_leaves(arch)
    elif "qkv" in arch.fused:
        found["qkv"] = Leaf("self_attn.qkv_proj.weight", ("hidden", "query_and_keys"))
    else:
        found |= {
            "q": Leaf(
                "self_attn.q_proj.weight", ("hidden", "query_and_gate" if arch.gated else "query")
            ),
            "k": Leaf("self_attn.k_proj.weight", ("hidden", "key")),
            "v": Leaf("self_attn.v_proj.weight", ("hidden", "key")),
        }
    found["o"] = Leaf("self_attn.o_proj.weight", ("attended", "hidden"))
    if arch.sinks:
        found["sinks"] = Leaf("self_attn.sinks", ("heads",))
    if QKV in arch.biases:
        found |= {f"{x}_bias": Leaf(f"self_attn.{x}_proj.bias", (found[x].axes[1],)) for x in "qkv"}
    if OUT in arch.biases:
        found["o_bias"] = Leaf("self_attn.o_proj.bias", ("hidden",))
    if arch.qk_norm:
        wide = {"q": "query", "k": "key"} if arch.wide_qk_norm else dict.fromkeys("qk", "head_dim")
        found |= {f"{x}_norm": Leaf(f"self_attn.{x}_norm.weight", (wide[x],)) for x in "qk"}
    if arch.delta is not None:
        of_attention = [name for name, leaf in found.items() if leaf.name.startswith("self_attn.")]
        found |= {name: replace(found[name], stack="attention") for name in of_attention}
        found |= delta_rule_leaves(arch.delta)
    if arch.out_norms:
        found |= {
            name: Leaf(f"{name}.weight", ("hidden",))
            for name in ("attention_out_norm", "mlp_out_norm")
        }
    found |= mlp_leaves(arch)
    if arch.varied is not None:
        found = varied_leaves(arch, found)
    # In families whose modules have other names.
    names = dict(arch.names)
    return {
        name: replace(leaf, name=f"{names[name]}.{leaf.name.rpartition('.')[2]}")
        if name in names
        else leaf
        for name, leaf in found.items()
    }


def latent_leaves(arch: Architecture) -> dict[str, Leaf]:
    """Returns the parameters of latent attention that make queries, keys and values."""
    assert arch.latent is not None
    into_vector = {"kv_a": ("self_attn.kv_a_proj_with_mqa", "latent_and_rotated")}
    if arch.latent.query_rank:
        into_vector["q_a"] = "self_attn.q_a_proj", "query_vector"
        found = {
            "q_a_norm": Leaf("self_attn.q_a_layernorm.weight", ("query_latent",)),
            "q_b": Leaf("self_attn.q_b_proj.weight", ("query_latent", "query")),
        }
    else:
        found = {"q": Leaf("self_attn.q_proj.weight", ("hidden", "query"))}
    found["kv_a_norm"] = Leaf("self_attn.kv_a_layernorm.weight", ("latent",))
    found["kv_b"] = Leaf("self_attn.kv_b_proj.weight", ("latent", "keys_and_values"))
    for name, (module, width) in into_vector.items():
        found[name] = Leaf(f"{module}.weight", ("hidden", width))
        if LATENTS in arch.biases:
            found[f"{name}_bias"] = Leaf(f"{module}.bias", (width,))
    return found


def delta_rule_leaves(rule: DeltaRule) -> dict[str, Leaf]:
    """Returns the parameters of a gated delta rule in place of attention."""
    kernels = (
        {"qkvz": "delta_qkvz", "ba": "delta_ba"}
        if rule.joined
        else {"qkv": "delta_qkv", "z": "delta_values", "b": "delta_heads", "a": "delta_heads"}
    )
    found = {
        f"delta_{name}": Leaf(f"linear_attn.in_proj_{name}.weight", ("hidden", axis))
        for name, axis in kernels.items()
    }
    found |= {
        "convolution": Leaf("linear_attn.conv1d.weight", ("delta_width", "delta_qkv")),
        "a_log": Leaf("linear_attn.A_log", ("delta_heads",)),
        "dt_bias": Leaf("linear_attn.dt_bias", ("delta_heads",)),
        "delta_norm": Leaf("linear_attn.norm.weight", ("delta_value_dim",)),
        "delta_o": Leaf("linear_attn.out_proj.weight", ("delta_values", "hidden")),
    }
    return {name: replace(leaf, stack="recurrent") for name, leaf in found.items()}


def mlp_leaves(arch: Architecture) -> dict[str, Leaf]:
    """Returns the parameters of a layer's MLP or mixture of experts."""
    if "gate_up" in arch.fused:
        return {
            "gate_up": Leaf("mlp.gate_up_proj.weight", ("hidden", "gate_and_up")),
            "down": Leaf("mlp.down_proj.weight", ("intermediate", "hidden")),
        }
    plain = mlp("", "mlp", "intermediate", MLP in arch.biases)
    if arch.experts is None:
        return plain
    if arch.experts.beside:
        return plain | mixture_beside()
    mixture = {"router": Leaf("mlp.gate.weight", ("hidden", "experts"))}
    if arch.experts.clamp or arch.experts.joined:
        of_experts = {
            "gate_up": ("hidden", "expert_gate_and_up"),
            "down": ("expert_intermediate", "hidden"),
        }
        for name, axes in of_experts.items():
            module = f"mlp.experts.{name}_proj"
            mixture[f"experts_{name}"] = Leaf(module, ("experts", *axes))
            if arch.experts.clamp:
                mixture[f"experts_{name}_bias"] = Leaf(f"{module}_bias", ("experts", axes[1]))
        if arch.experts.clamp:
            mixture["router_bias"] = Leaf("mlp.gate.bias", ("experts",))
    else:
        one = mlp("", "mlp.experts.{expert}", "expert_intermediate", False)
        mixture |= {
            f"experts_{name}": Leaf(leaf.name, ("experts", *leaf.axes))
            for name, leaf in one.items()
        }
    if arch.experts.router.corrected:
        # Ernie's has an axis more, and stands in a module of its own.
        own = ("one",) if "router_correction" in dict(arch.names) else ()
        mixture["router_correction"] = Leaf("mlp.gate.e_score_correction_bias", (*own, "experts"))
    if arch.experts.shared:
        module = "mlp.shared_expert" if arch.experts.shared_gate else "mlp.shared_experts"
        mixture |= mlp("shared_", module, "shared_intermediate", MLP in arch.biases)
        if arch.experts.shared_gate:
            mixture["shared_router"] = Leaf("mlp.shared_expert_gate.weight", ("hidden", "one"))
    if not arch.experts.dense:
        return mixture
    # Both kinds of layers: each stack holds the layers that have the leaf.
    return {
        **{name: replace(leaf, stack="dense") for name, leaf in plain.items()},
        **{name: replace(leaf, stack="sparse") for name, leaf in mixture.items()},
    }


ADAPTABLE = (
    *("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "kv_b", "o"),
    *(f"delta_{name}" for name in ("qkvz", "ba", "qkv", "z", "b", "a", "o")),
    *("gate", "up", "gate_up", "down", "inputs_gate", "inputs_projection"),
)
# Kernels of experts by transformers' names, which stack them; gate and up are one there.
OF_EXPERTS = {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}


def adaptable_kernels(arch: Architecture) -> tuple[str, ...]:
    """Returns the kernels that can have adapters. Routers cannot."""
    leaves = layer_leaves(replace(arch, adapters=None))
    # Llama 4 stacks its experts elsewhere, and transposed.
    adapts_experts = arch.experts is not None and not arch.experts.weighs_inputs
    of_experts = tuple(OF_EXPERTS) if adapts_experts else ()
    found = (name for local in ADAPTABLE for name in leaves if local_name(name) == local)
    return (*found, *of_experts)


def adapter_targets(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Returns the kernels that can have adapters by PEFT's names of their modules ("q_proj", …), or
    of experts' parameters ("experts.down_proj")."""
    leaves = layer_leaves(replace(arch, adapters=None))
    found: dict[str, tuple[str, ...]] = {}
    for kernel in adaptable_kernels(arch):
        of_experts = kernel in OF_EXPERTS
        target = EXPERTS + OF_EXPERTS[kernel] if of_experts else leaves[kernel].module
        found[target] = (*found.get(target, ()), kernel)
    return found


def adapter_leaves(arch: Architecture, kernels: Iterable[str]) -> dict[str, Leaf]:
    """Returns the adapters of these kernels under PEFT's names: q_lora_a [hidden, rank] and
    q_lora_b [rank, query] for q; of experts' kernels each with the experts before these axes."""
    decoder, found = layer_leaves(replace(arch, adapters=None)), {}
    kernels = tuple(kernels)
    for kernel in kernels:
        if kernel in OF_EXPERTS:
            stack = decoder["experts_down"].stack
            targets = [EXPERTS + OF_EXPERTS[x] for x in kernels if x in OF_EXPERTS]
            beside = arch.experts is not None and arch.experts.beside
            module = "experts" if beside else "mlp.experts"
            module += expert_module(OF_EXPERTS[kernel], targets)
            into, out = (
                ("hidden", "expert_gate_and_up")
                if kernel == "experts_gate_up"
                else ("expert_intermediate", "hidden")
            )
            a, b = ("experts", into, "rank"), ("experts", "rank", out)
            found[f"{kernel}_lora_a"] = Leaf(f"{module}.lora_A.weight", a, stack)
            found[f"{kernel}_lora_b"] = Leaf(f"{module}.lora_B.weight", b, stack)
            continue
        of = decoder[kernel]
        module, (into, out) = of.name.removesuffix(".weight"), of.axes
        found[f"{kernel}_lora_a"] = Leaf(f"{module}.lora_A.weight", (into, "rank"), of.stack)
        found[f"{kernel}_lora_b"] = Leaf(f"{module}.lora_B.weight", ("rank", out), of.stack)
    return found


def module_of(arch: Architecture) -> str:
    """Returns the decoder's module in Hugging Face's names."""
    if arch.module and arch.adapters is not None:
        return arch.memory
    if arch.vision is None or arch.module:
        return arch.module or "model"
    return MODULES[arch.vision.family][0]


def head_of(arch: Architecture) -> str:
    """Returns the name of the tensor of a language model's head."""
    return "language_model.lm_head.weight" if arch.module == ON_DISK else "lm_head.weight"


def other_leaves(arch: Architecture) -> dict[str, Leaf]:
    if arch.adapters is not None:
        return (
            {"score": Leaf(f"{PEFT_PREFIX}score.weight", ("hidden", "one"))} if arch.scores else {}
        )
    module = module_of(arch)
    embed, norm = (
        Leaf(f"{module}.embed_tokens.weight", ("vocab", "hidden")),
        Leaf(f"{module}.norm.weight", ("hidden",)),
    )
    found = {"embed": embed, "norm": norm, **input_leaves(arch, module)}
    if arch.scores:
        found["score"] = Leaf("score.weight", ("hidden", "one"))
    elif not arch.tied:
        found["head"] = Leaf(head_of(arch), ("hidden", "vocab"))
    return found


def sizes_of(arch: Architecture) -> dict[str, int]:
    """Returns the length of each kind of axis."""
    experts, latent = arch.experts, arch.latent
    of_latent = (
        {
            "query_vector": latent.query_rank,
            "query_latent": latent.query_rank,
            "latent_and_rotated": latent.rank + latent.rotated,
            "latent": latent.rank,
            "keys_and_values": arch.heads * (latent.plain + latent.value_dim),
        }
        if latent
        else {}
    )
    return (
        vision_axis_sizes(arch.vision)
        | of_latent
        | {
            "vocab": arch.vocab,
            "hidden": arch.hidden,
            "query": arch.heads * arch.head_dim,
            "key": arch.kv_heads * arch.head_dim,
            "attended": arch.heads * arch.value_dim,
            "query_and_keys": (arch.heads + 2 * arch.kv_heads) * arch.head_dim,
            "heads": arch.heads,
            "head_dim": arch.head_dim,
            "intermediate": arch.intermediate,
            "gate_and_up": 2 * arch.intermediate,
            "experts": experts.count if experts else 0,
            "expert_intermediate": experts.intermediate if experts else 0,
            "expert_gate_and_up": 2 * experts.intermediate if experts else 0,
            "shared_intermediate": experts.shared if experts else 0,
            "query_and_gate": 2 * arch.heads * arch.head_dim,
            **delta_rule_sizes(arch.delta),
            **varied_sizes(arch),
            **{stack: len(arch.layers_in(stack)) for stack in STACKS},
            "rank": arch.adapters.rank if arch.adapters else 0,
            "one": 1,
        }
    )


def delta_rule_sizes(rule: DeltaRule | None) -> dict[str, int]:
    if rule is None:
        return {}
    return {
        "delta_width": rule.width,
        "delta_qkv": rule.channels,
        "delta_values": rule.values,
        "delta_qkvz": rule.channels + rule.values,
        "delta_ba": 2 * rule.value_heads,
        "delta_heads": rule.value_heads,
        "delta_value_dim": rule.value_dim,
    }


def parameter_axes(arch: Architecture) -> Params:
    """Returns the tree of parameters with the kinds of their axes, as tuples, in place of
    arrays."""
    layers = {name: (leaf.stack, *leaf.axes) for name, leaf in layer_leaves(arch).items()}
    found: Params = {
        **{name: leaf.axes for name, leaf in other_leaves(arch).items()},
        "layers": layers,
    }
    if arch.vision is not None and arch.adapters is None:
        found["vision"] = {}
        for path, leaf in vision_leaves(arch.vision).items():
            *outer, name = path
            within = found["vision"].setdefault(outer[0], {}) if outer else found["vision"]
            within[name] = (*stack_of(path), *leaf.axes)
    return found


def parameter_shapes(arch: Architecture) -> Params:
    """Returns the tree of parameters as shapes and dtypes (fp32), without allocating any: embed
    [vocab, hidden], norm [hidden], layers (stacked: every leaf begins with the axis of the layers
    that have it), and score [hidden, 1] or, unless it is tied, head [hidden, vocab]; vision: the
    tower, if there is one (see areal_x_jax.vision_parameters). Of adapters: their layers, and the score. Names are in
    alphabetical order, as jax flattens a dict."""
    return _shapes(parameter_axes(arch), sizes_of(arch))


def _shapes(axes: Params, sizes: Mapping[str, int]) -> Params:
    return {
        name: _shapes(own, sizes)
        if isinstance(own, dict)
        else jax.ShapeDtypeStruct([sizes[axis] for axis in own], jnp.float32)
        for name, own in sorted(axes.items())
    }
