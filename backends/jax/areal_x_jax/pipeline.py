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

With several groups of layers each, stage i of s has the groups i, i + s, …, and all rows go round
the stages once for each (the interleaved placement of arXiv 2104.04473): a turn is one group's time,
so that stages - 1 turns are a smaller part of the whole.

    turn       0     1     2     3     4     5     6       rows 0, 1, 2, two groups each
    stage 0   r0 0  r1 0  r2 0  r0 2  r1 2  r2 2   –       and the group that computes them
    stage 1    –    r0 1  r1 1  r2 1  r0 3  r1 3  r2 3

Each stage keeps its last outputs, as many as there are rows, until the last stage sends them round
again; so there must be at least as many rows as stages, or stages wait in every round.
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


def turns(rows: int, stages: int, groups: int) -> int:
    """Returns the turns that so many rows take through stages of `groups` groups of layers each. At
    best each stage computes in rows · groups of them."""
    return (groups - 1) * max(rows, stages) + rows + stages - 1


def in_turns(
    arch: Architecture,
    partitioner: Partitioner,
    through: Through,
    policy: Callable[..., Any],
    layers: Params,
    x: Float[Array, "rows length hidden"],
    of_rows: Any,
    per_layer: Any,
    of_tokens: Any,
) -> tuple[Array, Use | None]:
    """Returns what `through` does for all layers and rows; each layer's imbalance is its mean over the
    turns, weighted by tokens, and layers with experts are in the order of their stack.

    policy: what the backward pass saves of a turn of stages with several groups, which it computes
    again as a whole. of_rows: a tree of arrays [rows, …], the second of
    them the rows' segments. per_layer: a tree of arrays [layers, …]. of_tokens: a tree of arrays
    [layers, rows, …].
    """
    (stages, groups), shares = arch.stages, partitioner.size(*ROW_AXES)
    rows = len(x) // shares  # of a device
    around = max(rows, stages)  # turns from one round to the next
    of_group = group_architecture(arch)
    number_of = jnp.arange(stages)

    def by_turn(a: Array, axis: int = 0) -> Array:
        """Divides the axis of rows: every device has one row in each turn."""
        shape = a.shape[:axis], (shares, rows), a.shape[axis + 1 :]
        return jnp.moveaxis(a.reshape(*(n for part in shape for n in part)), axis + 1, axis)

    several = (groups,) if groups > 1 else ()  # no axis for one group

    def by_group(a: Any) -> Array:
        """Divides an axis of layers in the model's order: [stages, groups, layers of a group, …]."""
        a = jnp.reshape(a, (*several, stages, -1, *a.shape[1:]))
        return jnp.swapaxes(a, 0, 1) if several else a

    # Stacks are in the order of stages already.
    layers = jax.tree.map(lambda a: a.reshape(stages, *several, -1, *a.shape[1:]), layers)
    per_layer = jax.tree.map(by_group, per_layer)
    of_rows = jax.tree.map(by_turn, of_rows)
    # A copy for each stage, so that gradients of all turns are summed over stages at once.
    inputs = jnp.broadcast_to(by_turn(x), (stages, rows, shares, *x.shape[1:]))
    inputs = partitioner.constrain(inputs, "stages", None, "rows", "length", None)
    # [stages, rows, groups, layers, rows of a turn, …]
    axis = 2 + len(several)
    of_tokens = jax.tree.map(lambda a: jnp.moveaxis(by_turn(by_group(a), axis), axis, 1), of_tokens)

    def at_stage(mask: Array) -> Array:
        return mask.reshape(stages, *(1,) * x.ndim)

    def compute(
        layers: Params, group: Array, row: Array, x: Array, own: Any, per_layer: Any, of_tokens: Any
    ) -> tuple[Array, Use | None]:
        """A turn of one stage."""

        def pick(a: Array) -> Array:
            return a[group] if several else a

        layers, per_layer = jax.tree.map(pick, (layers, per_layer))
        return through(
            of_group, layers, x, own, per_layer, jax.tree.map(lambda a: pick(a[row]), of_tokens)
        )

    if (
        several
    ):  # Of each turn the layers of its group would be saved: the backward pass finds them.
        compute = jax.checkpoint(compute, policy=policy, prevent_cse=False)
    of_stages = jax.vmap(compute, spmd_axis_name="stage")

    def turn(state: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], Any]:
        x, kept = state  # the last outputs of each stage; those of turn i at i % around
        if several:  # The last stage sends what the first needs now.
            needed = kept[:, (number + stages - 1) % around]
            x = jnp.where(at_stage(number_of == stages - 1), needed, x)
        x = jnp.roll(x, 1, axis=0)
        own = number - number_of  # counts the rows of each stage, in all rounds
        row, group = jnp.clip(own % around, 0, rows - 1), jnp.clip(own // around, 0, groups - 1)
        enters = (number_of == 0) & (number < around)
        x = jnp.where(at_stage(enters), inputs[:, jnp.minimum(number, rows - 1)], x)
        x = partitioner.constrain(x, "stages", "rows", "length", None)
        of_row = jax.tree.map(lambda a: a[row], of_rows)
        x, use = of_stages(layers, group, row, x, of_row, per_layer, of_tokens)
        x = partitioner.constrain(x, "stages", "rows", "length", None)
        kept = kept.at[:, number % around].set(x)
        has_rows = (own >= 0) & (own < groups * around) & (own % around < rows)
        tokens = (of_row[1] > 0).sum(range(1, of_row[1].ndim)) * has_rows
        if use is not None:
            use = Use(use.imbalance * tokens[:, None], use.load * has_rows[:, None, None])
        return (x, kept), (use, tokens, group)

    def zeros(*shape: int) -> Array:
        made = jnp.zeros((*shape, shares, *x.shape[1:]), x.dtype)
        between = (None,) * (len(shape) - 1)
        return partitioner.constrain(made, "stages", *between, "rows", "length", None)

    (_, kept), (use, tokens, group) = jax.lax.scan(
        turn, (zeros(stages), zeros(stages, around)), jnp.arange(turns(rows, stages, groups))
    )
    outputs = jnp.roll(kept[-1], 1 - stages, axis=0)[:rows]
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(x.shape)
    if use is not None:
        here = group[..., None] == jnp.arange(groups)  # [turns, stages, groups]
        total = jnp.maximum((tokens[..., None] * here).sum(0), 1)[..., None]
        imbalance = jnp.einsum("tsl,tsg->sgl", use.imbalance, here) / total
        load = jnp.einsum("tsle,tsg->sgle", use.load, here.astype(use.load.dtype))
        use = Use(imbalance.reshape(-1), load.reshape(-1, load.shape[-1]))
    return partitioner.constrain(outputs, "rows", "length", None), use


def group_architecture(arch: Architecture) -> Architecture:
    """Returns the architecture with the layers of the first group, whose kinds those of all groups
    have."""
    stages, groups = arch.stages
    layers, experts = arch.layers // (stages * groups), arch.experts
    if experts is not None:
        experts = replace(experts, dense=tuple(i for i in experts.dense if i < layers))
    delta = arch.delta
    if delta is not None:
        delta = replace(delta, layers=tuple(i for i in delta.layers if i < layers))
    varied = arch.varied.first(layers) if arch.varied else None
    return replace(arch, layers=layers, experts=experts, delta=delta, varied=varied, stages=(1, 1))
