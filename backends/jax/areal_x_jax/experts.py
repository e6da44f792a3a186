"""A mixture of experts in place of an MLP: each token goes through the few experts that a router
chooses.

    tokens ──router──▶ chosen experts, weights ──sort by expert──▶ grouped matmuls ──weigh, add──▶ tokens

With the mesh axis "expert" each device holds some of the experts: it gathers the tokens of its
group, applies its own experts, and the outputs are scattered back to the tokens' devices and
summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_jax import fp8, routers
from areal_x_jax.mixtures import Experts
from areal_x_jax.parameters import Params
from areal_x_jax.ragged_products import ragged_dot
from areal_x_jax.sharding import Partitioner

Activation = Callable[[Array], Array]


class Routing(NamedTuple):
    """Experts chosen for each token, the weights of their outputs, and the probabilities of all
    experts, in fp32."""

    chosen: Int[Array, "... per_token"]
    weights: Float[Array, "... per_token"]
    probabilities: Float[Array, "... experts"]


class Use(NamedTuple):
    """How tokens use the experts of a layer; of several layers, each with an axis for them.

    imbalance: see `imbalance`. load: how many of the trained tokens go through each expert.
    """

    imbalance: Float[Array, "*layers"]
    load: Float[Array, "*layers experts"]


def check_settings(config: TrainerConfig, experts: Experts | None, directory: Path) -> None:
    """Raises: ConfigError for settings of routers that a directory's model cannot follow."""
    if config.replay_experts and experts is None:
        wanted = f"False with {directory}, which has no experts"
        raise ConfigError("trainer.replay_experts", True, wanted)
    if config.balance_rate and (experts is None or not experts.router.corrected):
        lacks = "which has no experts"
        if experts is not None:
            lacks = "whose routers have no bias to choose experts by: use trainer.balance"
        raise ConfigError(
            "trainer.balance_rate", config.balance_rate, f"0 with {directory}, {lacks}"
        )


def route(
    experts: Experts,
    router: Float[Array, "hidden experts"],
    x: Float[Array, "... hidden"],
    recorded: Int[Array, "... per_token"] | None = None,
    bias: Float[Array, " experts"] | None = None,
    correction: Float[Array, "*_ experts"] | None = None,
) -> Routing:
    """Returns the best experts of each token by the rule of `Experts.router`; with `recorded`, those that the engine chose
    when it sampled the token (-1 if it recorded none), so that trainer and engine compute the same
    function. Source of the replay: arXiv 2510.11370."""
    rule = experts.router
    logits = routers.logits_of(rule, router, x, bias)
    scores = routers.SCORES[rule.score](logits.astype(jnp.float32))
    own, chosen = routers.choose(rule, logits, scores, correction, experts.per_token)
    if recorded is not None:
        chosen = jnp.where(recorded >= 0, recorded, chosen)
        own = jnp.take_along_axis(scores, chosen, axis=-1)
    weights = routers.weights_of(rule, own, experts.normalised)
    return Routing(chosen, weights.astype(x.dtype), routers.probabilities_of(rule, scores))


def mixture(
    layer: Params,
    x: Float[Array, "rows length hidden"],
    routing: Routing,
    activation: Activation,
    partitioner: Partitioner,
    clamp: tuple[float, float] | None = None,
    weighs_inputs: bool = False,
) -> Float[Array, "rows length hidden"]:
    """Returns the weighted sum of the chosen experts' outputs. layer: experts_gate, experts_up
    [experts, hidden, intermediate] and experts_down; or experts_gate_up in place of the first two.
    With `clamp` (see `Experts`) gates and ups alternate there, and both have biases. Each expert's
    adapters, if the layer has them, are those of gate and up together, and of down.
    weighs_inputs: see `Experts`."""
    own = {
        name.removeprefix("experts_"): value
        for name, value in layer.items()
        if name.startswith("experts_")
    }
    compute = partial(grouped, activation, clamp, weighs_inputs)
    if partitioner.size("expert") == 1:
        return compute(x, routing.chosen, routing.weights, own, 0)

    def part(x: Array, chosen: Array, weights: Array, own: Params) -> Array:
        x, chosen, weights = (
            jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, chosen, weights)
        )
        first = jax.lax.axis_index("expert") * own["down"].shape[0]
        combined = compute(x, chosen, weights, own, first)
        return jax.lax.psum_scatter(combined, "expert", scatter_dimension=0, tiled=True)

    spec = PartitionSpec("expert")
    # Stages are an axis of the arrays around this function (areal_x_jax.pipeline).
    axes = ("expert",) if partitioner.size("stage") == 1 else ("stage", "expert")
    return partitioner.shard_map(part, (spec,) * 4, spec, axes)(
        x, routing.chosen, routing.weights, own
    )


def grouped(
    activation: Activation,
    clamp: tuple[float, float] | None,
    weighs_inputs: bool,
    x: Array,
    chosen: Array,
    weights: Array,
    own: Params,
    first: Array | int,
) -> Array:
    """Computes the experts `first`, first + 1, … whose parameters are given; others contribute
    nothing."""
    per_token, here = chosen.shape[-1], own["down"].shape[0]
    tokens = x.reshape(-1, x.shape[-1])
    which = chosen.reshape(-1) - first
    # Choices of other devices' experts come last, in no group.
    which = jnp.where((which >= 0) & (which < here), which, here)
    order = jnp.argsort(which, stable=True)
    sizes = jnp.bincount(which, length=here).astype(jnp.int32)

    def product(x: Array, name: str) -> Array:
        kernels = own[name]
        multiply = fp8.ragged_dot if isinstance(kernels, fp8.Kernel) else ragged_dot
        y = multiply(x, kernels, sizes)
        y = y + adapted(x, name) if f"{name}_lora_a" in own else y
        return y + own[f"{name}_bias"][which[order]] if f"{name}_bias" in own else y

    def adapted(x: Array, name: str) -> Array:
        """What adapters add to a product: their scale is in lora_b."""
        small = ragged_dot(x, own[f"{name}_lora_a"], sizes)
        return ragged_dot(small, own[f"{name}_lora_b"], sizes)

    sorted_tokens, factors = tokens[order // per_token], weights.reshape(-1)[order][:, None]
    if weighs_inputs:
        sorted_tokens = sorted_tokens * factors
    if clamp is not None:
        inner = clamped(product(sorted_tokens, "gate_up"), *clamp)
    elif "gate_up" in own:
        gate, up = jnp.split(product(sorted_tokens, "gate_up"), 2, axis=-1)
        inner = activation(gate) * up
    else:
        gate, up = product(sorted_tokens, "gate"), product(sorted_tokens, "up")
        if "gate_up_lora_a" in own:
            of_gate, of_up = jnp.split(adapted(sorted_tokens, "gate_up"), 2, axis=-1)
            gate, up = gate + of_gate, up + of_up
        inner = activation(gate) * up
    outputs = product(inner, "down")
    outputs = jnp.where((jnp.arange(len(order)) < sizes.sum())[:, None], outputs, 0)
    outputs = outputs if weighs_inputs else outputs * factors
    # In the order of tokens, so that the sum does not depend on the routing.
    back = outputs[jnp.argsort(order)]
    return back.reshape(len(tokens), per_token, -1).sum(1).reshape(x.shape)


def clamped(
    gate_up: Float[Array, "tokens both"], slope: float, limit: float
) -> Float[Array, "tokens half"]:
    """Returns (u + 1) · g · sigmoid(α · g), where g, even features, is at most the limit, and u, odd
    ones, within ± the limit. Source: gpt-oss, arXiv 2508.10925."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(gate * slope)


def use(routing: Routing, real: Bool[Array, ...], trained: Bool[Array, ...]) -> Use:
    """Returns how evenly the real tokens' experts are chosen, and the load by the trained ones."""
    hits = hits_of(routing) * trained[..., None]
    return Use(imbalance(routing, real), hits.reshape(-1, hits.shape[-1]).sum(0))


def hits_of(routing: Routing) -> Float[Array, "... experts"]:
    """Returns 1 for each expert that a token goes through, 0 for the others."""
    return jax.nn.one_hot(routing.chosen, routing.probabilities.shape[-1]).sum(-2)


def imbalance(routing: Routing, counted: Bool[Array, ...]) -> Float[Array, ""]:
    """Returns experts · Σ f · p, where f is the share of the counted tokens routed to an expert and
    p its mean probability: 1 per chosen expert if all are used alike. Source: Switch Transformer,
    arXiv 2101.03961, eq. 4."""
    experts = routing.probabilities.shape[-1]
    total = jnp.maximum(counted.sum(), 1)
    share, mean = (
        (x * counted[..., None]).reshape(-1, experts).sum(0) / total
        for x in (hits_of(routing), routing.probabilities)
    )
    return experts * jnp.sum(share * mean)
