"""Layers in segments that repeat, so that a model with two kinds of layers is scanned and not
unrolled.

A mixture with dense layers between is a few segments: `decoder_sparse_step` = 2 is one, whose two
layers repeat, and a dense first layer is one of its own before the rest. A model of equal layers is
one segment of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jaxtyping import Array

from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import Params, adaptable_kernels, adapter_leaves, layer_leaves


@dataclass(frozen=True)
class LayerRun:
    """`repeats` times the same `period` layers, from layer `first` on."""

    first: int
    period: int
    repeats: int

    @property
    def count(self) -> int:
        return self.period * self.repeats


def layer_runs(kinds: Sequence[Any]) -> list[LayerRun]:
    """All layers in order, where each segment leaves out as many layers of the program as any that
    begins there."""
    found, first = [], 0
    while first < len(kinds):
        left, best = len(kinds) - first, LayerRun(first, 1, 1)
        for period in range(1, left // 2 + 1):
            unit, repeats = kinds[first : first + period], 1
            while kinds[first + repeats * period : first + (repeats + 1) * period] == unit:
                repeats += 1
            if period * (repeats - 1) > best.count - best.period:
                best = LayerRun(first, period, repeats)
        found.append(best)
        first += best.count
    return found


def scan(
    arch: Architecture,
    step: Callable[[Array, tuple[Params, Any]], tuple[Array, Array | None]],
    x: Array,
    layers: Params,
    each: Any,
) -> tuple[Array, list[Array]]:
    """x through all layers: `step(x, (a layer's parameters, what `each` holds of it))` gives the
    next x and a number or None.

    layers: stacked (see `Leaf.stack`). each: a tree of arrays whose first axis is that of all
    layers. Returns the numbers of each segment's layers that give any.
    """
    leaves, numbers = layer_leaves(arch) | adapter_leaves(arch, adaptable_kernels(arch)), []
    places = {stack: arch.layers_in(stack) for stack in ("layers", "dense", "sparse")}
    for segment in layer_runs([layer in places["dense"] for layer in places["layers"]]):
        # Where this segment's layers stand in each stack, and those of its first period.
        within = {
            stack: [at for at, layer in enumerate(own) if layer in _layers(segment)]
            for stack, own in places.items()
        }
        stacks = {
            name: _cut(x, within[leaves[name].stack], segment.repeats) for name, x in layers.items()
        }
        of_layers = jax.tree.map(
            lambda x, at=within["layers"], n=segment.repeats: _cut(x, at, n), each
        )

        def period(x: Array, of: Any, segment: LayerRun = segment) -> tuple[Array, list[Array]]:
            stacks, of_layers = of
            said = []
            for j in range(segment.period):
                layer = segment.first + j
                weights = {}
                for name, stack in stacks.items():
                    own = [
                        other
                        for other in places[leaves[name].stack]
                        if other in _layers(segment)[: segment.period]
                    ]
                    if layer in own:
                        weights[name] = stack if len(own) == 1 else stack[own.index(layer)]
                x, number = step(
                    x,
                    (
                        weights,
                        (
                            of_layers
                            if segment.period == 1
                            else jax.tree.map(itemgetter(j), of_layers)
                        ),
                    ),
                )
                said += [] if number is None else [number]
            return x, said

        x, said = jax.lax.scan(period, x, (stacks, of_layers))
        numbers += said
    return x, numbers


def _layers(segment: LayerRun) -> range:
    return range(segment.first, segment.first + segment.count)


def _cut(x: Any, at: Sequence[int], repeats: int) -> Any:
    """Some neighbours of a stack as [repeats, of one period, …], without the second axis where a
    period has one (it would be a copy of the parameters and of their gradients); None where there
    are none."""
    if not at:
        return None
    part = x if len(at) == len(x) else x[at[0] : at[-1] + 1]
    return part if len(at) == repeats else part.reshape(repeats, len(at) // repeats, *x.shape[1:])
