"""The decoder's layers divided among stages of devices. The rows that each device would compute at
once go through them in turns, one after the other.

    turn       0    1    2    3    4        rows 0, 1, 2, two stages
    stage 0   r0   r1   r2    –    –
    stage 1    –   r0   r1   r2    –

All stages compute in every turn, on an array whose first axis is the stage and is sharded over the
mesh's "stage": between two turns it is rolled by one, so that each stage's output becomes the input
of the next. Where there are no rows a stage computes what nobody reads: of rows + stages - 1 turns,
stages - 1 are lost (GPipe, arXiv 1811.06965; the array of stages is that of GSPMD, arXiv 2105.04663,
section 3.3). The backward pass is this one's transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_x_jax.architecture import Architecture
from areal_x_jax.experts import Use
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import ROW_AXES, Partitioner

Through = Callable[..., tuple[Array, Use | None]]
"""`(architecture, layers, x, of_rows, per_layer, of_tokens)`: applies all layers of an architecture to
rows, see `in_turns`."""


def in_turns(
    arch: Architecture,
    partitioner: Partitioner,
    through: Through,
    layers: Params,
    x: Float[Array, "rows length hidden"],
    of_rows: Any,
    per_layer: Any,
    of_tokens: Any,
) -> tuple[Array, Use | None]:
    """Returns what `through` does for all layers and rows; each layer's imbalance is its mean over the
    turns, weighted by tokens.

    of_rows: a tree of arrays [rows, …], the second of them the rows' segments. per_layer: a tree of
    arrays [layers, …]. of_tokens: a tree of arrays [layers, rows, …].
    """
    stages, shares = partitioner.size("stage"), partitioner.size(*ROW_AXES)
    turns = len(x) // shares
    of_stage = stage_architecture(arch, stages)

    def by_turn(a: Array, axis: int = 0) -> Array:
        """Divides the axis of rows: every device has one row in each turn."""
        shape = a.shape[:axis], (shares, turns), a.shape[axis + 1 :]
        return jnp.moveaxis(a.reshape(*(n for part in shape for n in part)), axis + 1, axis)

    def by_stage(a: Any) -> Array:
        return jnp.reshape(a, (stages, -1, *a.shape[1:]))

    layers, per_layer = jax.tree.map(by_stage, (layers, per_layer))
    inputs, of_rows = jax.tree.map(by_turn, (x, of_rows))
    # [stages, turns, layers, rows, …]
    of_tokens = jax.tree.map(lambda a: jnp.moveaxis(by_turn(by_stage(a), 2), 2, 1), of_tokens)

    def turn(x: Array, number: Array) -> tuple[Array, Any]:
        x = jnp.roll(x, 1, axis=0).at[0].set(inputs[jnp.minimum(number, turns - 1)])
        x = partitioner.constrain(x, "stages", "rows", "length", None)
        own = number - jnp.arange(stages)  # the rows that each stage has
        at = jnp.clip(own, 0, turns - 1)
        rows = jax.tree.map(lambda a: a[at], of_rows)
        own_tokens = jax.tree.map(lambda a: jax.vmap(lambda a, i: a[i])(a, at), of_tokens)
        x, use = jax.vmap(lambda *of: through(of_stage, *of), spmd_axis_name="stage")(
            layers, x, rows, per_layer, own_tokens
        )
        x = partitioner.constrain(x, "stages", "rows", "length", None)
        has_rows = (own >= 0) & (own < turns)
        tokens = (rows[1] > 0).sum(range(1, rows[1].ndim)) * has_rows
        if use is not None:
            use = Use(use.imbalance * tokens[:, None], use.load * has_rows[:, None, None])
        return x, (x[-1], use, tokens)

    nothing = jnp.zeros((stages, *inputs.shape[1:]), x.dtype)
    _, (outputs, use, tokens) = jax.lax.scan(turn, nothing, jnp.arange(turns + stages - 1))
    outputs = jnp.moveaxis(outputs[stages - 1 :], 0, 1).reshape(x.shape)
    if use is not None:
        total = jnp.maximum(tokens.sum(0), 1)[:, None]
        imbalance, load = use.imbalance.sum(0) / total, use.load.sum(0)
        use = Use(imbalance.reshape(-1), load.reshape(-1, load.shape[-1]))
    return partitioner.constrain(outputs, "rows", "length", None), use


def stage_architecture(arch: Architecture, stages: int) -> Architecture:
    """Returns the architecture with the layers of the first stage, whose kinds those of all stages
    have."""
    layers, experts = arch.layers // stages, arch.experts
    if experts is not None:
        experts = replace(experts, dense=tuple(i for i in experts.dense if i < layers))
    delta = arch.delta
    if delta is not None:
        delta = replace(delta, layers=tuple(i for i in delta.layers if i < layers))
    varied = arch.varied.first(layers) if arch.varied else None
    return replace(arch, layers=layers, experts=experts, delta=delta, varied=varied)
