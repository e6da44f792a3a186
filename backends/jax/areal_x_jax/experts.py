"""A mixture of experts in place of an MLP: each token goes through the few experts that a router
chooses.

    tokens ──router──▶ chosen experts, weights ──sort by expert──▶ grouped matmuls ──weigh, add──▶ tokens

With the mesh axis "expert" each device holds some of the experts: it gathers the tokens of its
group, applies its own experts, and the outputs are scattered back to the tokens' devices and
summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.architecture import Experts
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import Partitioner

Activation = Callable[[Array], Array]


class Routing(NamedTuple):
    """Experts chosen for each token, the weights of their outputs, and the probabilities of all
    experts, in fp32."""

    chosen: Int[Array, "... per_token"]
    weights: Float[Array, "... per_token"]
    probabilities: Float[Array, "... experts"]


def route(
    experts: Experts,
    router: Float[Array, "hidden experts"],
    x: Float[Array, "... hidden"],
    recorded: Int[Array, "... per_token"] | None = None,
) -> Routing:
    """Returns the most probable experts of each token; with `recorded`, those that the engine chose
    when it sampled the token (-1 if it recorded none), so that trainer and engine compute the same
    function. Source of the replay: arXiv 2510.11370."""
    probabilities = jax.nn.softmax((x @ router.astype(x.dtype)).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if recorded is not None:
        chosen = jnp.where(recorded >= 0, recorded, chosen)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(chosen, weights.astype(x.dtype), probabilities)


def mixture(
    layer: Params,
    x: Float[Array, "rows length hidden"],
    routing: Routing,
    activation: Activation,
    partitioner: Partitioner,
) -> Float[Array, "rows length hidden"]:
    """Returns the weighted sum of the chosen experts' outputs. layer: experts_gate, experts_up
    [experts, hidden, intermediate] and experts_down."""
    gate, up, down = (layer[f"experts_{name}"] for name in ("gate", "up", "down"))
    if partitioner.size("expert") == 1:
        return grouped(x, routing.chosen, routing.weights, gate, up, down, 0, activation)

    def part(x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
        x, chosen, weights = (
            jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, chosen, weights)
        )
        first = jax.lax.axis_index("expert") * gate.shape[0]
        combined = grouped(x, chosen, weights, gate, up, down, first, activation)
        return jax.lax.psum_scatter(combined, "expert", scatter_dimension=0, tiled=True)

    spec = PartitionSpec("expert")
    return partitioner.shard_map(part, (spec,) * 6, spec, ("expert",))(
        x, routing.chosen, routing.weights, gate, up, down
    )


def grouped(
    x: Array,
    chosen: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    first: Array | int,
    activation: Activation,
) -> Array:
    """Computes the experts `first`, first + 1, … whose kernels are given; others contribute
    nothing."""
    per_token, here = chosen.shape[-1], gate.shape[0]
    tokens = x.reshape(-1, x.shape[-1])
    own = chosen.reshape(-1) - first
    # Choices of other devices' experts come last, in no group.
    own = jnp.where((own >= 0) & (own < here), own, here)
    order = jnp.argsort(own, stable=True)
    sizes = jnp.bincount(own, length=here).astype(jnp.int32)
    sorted_tokens = tokens[order // per_token]
    inner = activation(jax.lax.ragged_dot(sorted_tokens, gate, sizes)) * jax.lax.ragged_dot(
        sorted_tokens, up, sizes
    )
    outputs = jax.lax.ragged_dot(inner, down, sizes)
    outputs = (
        jnp.where((jnp.arange(len(order)) < sizes.sum())[:, None], outputs, 0)
        * weights.reshape(-1)[order][:, None]
    )
    # In the order of tokens, so that the sum does not depend on the routing.
    back = outputs[jnp.argsort(order)]
    return back.reshape(len(tokens), per_token, -1).sum(1).reshape(x.shape)


def imbalance(routing: Routing, counted: Bool[Array, ...]) -> Float[Array, ""]:
    """Returns experts · Σ f · p, where f is the share of the counted tokens routed to an expert and
    p its mean probability: 1 per chosen expert if all are used alike. Source: Switch Transformer,
    arXiv 2101.03961, eq. 4."""
    experts = routing.probabilities.shape[-1]
    total = jnp.maximum(counted.sum(), 1)
    hits = jax.nn.one_hot(routing.chosen, experts).sum(-2)
    share, mean = (
        (x * counted[..., None]).reshape(-1, experts).sum(0) / total
        for x in (hits, routing.probabilities)
    )
    return experts * jnp.sum(share * mean)
