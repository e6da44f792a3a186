"""A layer's MLP, or its experts."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from areal_x_jax import experts
from areal_x_jax.architecture import Architecture
from areal_x_jax.layer_parts import ACTIVATIONS, gated_mlp, norm, unit_rms
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import Partitioner


def feed_forward(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "... hidden"],
    y: Float[Array, "... hidden"],
    partitioner: Partitioner,
    recorded: Int[Array, "... per_token"] | None,
) -> tuple[Float[Array, "... hidden"], experts.Routing | None]:
    """Returns what a layer's MLP, experts or both give, and how experts were chosen.

    x: what their output is added to. y: the MLP's input, x normalised. recorded: see `experts.route`.
    """
    activation = ACTIVATIONS[arch.activation]
    if arch.experts is None or "router" not in layer:
        return gated_mlp(layer, "", y, activation), None
    if arch.experts.beside:
        plain = gated_mlp(layer, "", y, activation)
        scaled = unit_rms(x, arch.eps) * layer["router_scale"] * arch.hidden**-0.5
        routing = experts.route(arch.experts, layer["router"], scaled, recorded)
        of_chosen = layer["expert_scale"][routing.chosen]
        routing = routing._replace(weights=routing.weights * of_chosen)
        y = norm(x, layer["mixture_norm"], arch)
        y = experts.mixture(layer, y, routing, activation, partitioner)
        y = norm(y, layer["mixture_out_norm"], arch)
        return norm(plain, layer["plain_out_norm"], arch) + y, routing
    biases = layer.get("router_bias"), layer.get("router_correction")
    routing = experts.route(arch.experts, layer["router"], y, recorded, *biases)
    shared: Array | int = 0
    if arch.experts.shared:
        shared = gated_mlp(layer, "shared_", y, activation)
        if "shared_router" in layer:
            shared = jax.nn.sigmoid(y @ layer["shared_router"]) * shared
    rule = arch.experts.clamp, arch.experts.weighs_inputs
    return experts.mixture(layer, y, routing, activation, partitioner, *rule) + shared, routing
