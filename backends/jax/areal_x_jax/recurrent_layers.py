"""Layers with a gated delta rule in place of attention: its inputs from a layer's, and a layer's output
from what it gives (areal_x_jax.delta_rule)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from areal_x_jax import delta_rule
from areal_x_jax.architecture import Architecture
from areal_x_jax.delta_rule import Inputs
from areal_x_jax.layer_parts import ACTIVATIONS, affine, norm
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import AXES, ONE_DEVICE, Partitioner


def recur(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "rows length hidden"],
    segment_ids: Int[Array, "rows length"],
    partitioner: Partitioner = ONE_DEVICE,
) -> Float[Array, "rows length values"]:
    """Returns the output of a gated delta rule, in the place of attention's. On a mesh each device
    computes its heads of its rows, which are whole."""
    mixed = project_mixed(arch, layer, x)
    mixed = mixed._replace(channels=partitioner.constrain(mixed.channels, "rows", None, None))
    convolved = delta_rule.convolve(mixed.channels, layer["convolution"], segment_ids)
    inputs = recurrent_inputs(arch, layer, convolved, mixed)
    run: Any = delta_rule.gated_delta_rule
    if partitioner.size(*AXES) > 1:
        heads = partitioner.spec("rows", None, "heads")
        ids = partitioner.spec("rows", None)
        run = partitioner.shard_map(run, (Inputs(*[heads] * 5), ids), heads)
    return recurrent_output(arch, layer, run(inputs, segment_ids), mixed.gate)


def project_mixed(
    arch: Architecture, layer: Params, x: Float[Array, "... hidden"]
) -> delta_rule.Mixed:
    assert arch.delta is not None
    x = norm(x, layer["input_norm"], arch)
    if arch.delta.joined:
        both = (affine(layer, f"delta_{name}", x) for name in ("qkvz", "ba"))
        return delta_rule.separated(arch.delta, *both)
    return delta_rule.Mixed(*(affine(layer, f"delta_{name}", x) for name in ("qkv", "b", "a", "z")))


def recurrent_inputs(
    arch: Architecture, layer: Params, convolved: Array, mixed: delta_rule.Mixed
) -> Inputs:
    assert arch.delta is not None
    active = ACTIVATIONS[arch.activation](convolved)
    return delta_rule.rule_inputs(arch.delta, active, mixed, layer["a_log"], layer["dt_bias"])


def recurrent_output(
    arch: Architecture,
    layer: Params,
    found: Float[Array, "... key_heads group value_dim"],
    gate: Float[Array, "... values"],
) -> Float[Array, "... values"]:
    by_head = gate.reshape(found.shape)
    return delta_rule.gated_norm(found, by_head, layer["delta_norm"], arch.eps).reshape(gate.shape)
