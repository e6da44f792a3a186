"""A scan over layers in runs that repeat, so that a model with two kinds of layers is scanned
instead of unrolled.

A mixture with dense layers in between is a few runs: `decoder_sparse_step` = 2 is one run of two
repeating layers, and a dense first layer is a run of its own before the rest. A model of equal
layers is one run of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from areal_x_jax.architecture import STACKS, Architecture
from areal_x_jax.leaf import local_name
from areal_x_jax.parameters import Params, adaptable_kernels, adapter_leaves, layer_leaves

Passed: TypeAlias = "tuple[Array, Any, tuple[Array, Array] | None]"
Step: TypeAlias = Callable[[int, Array, tuple[Params, Any], Any], Passed]


@dataclass(frozen=True)
class LayerRun:
    """The same `period` layers, `repeats` times, from layer `first` on."""

    first: int
    period: int
    repeats: int

    @property
    def count(self) -> int:
        return self.period * self.repeats


def layer_runs(kinds: Sequence[Any]) -> list[LayerRun]:
    """Returns all layers in order, each run chosen to save as many layers of the program as any
    that begins there."""
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
    step: Step,
    x: Array,
    layers: Params,
    per_layer: Any,
) -> tuple[Array, Any]:
    """Applies all layers to x: `step(number, x, (a layer's parameters, its entry of per_layer),
    kept)` returns the next x, a tree of numbers or None, and keys and values or None. number: of the
    first layer of this kind in its run. kept: what the layer returned that this one attends to, if it
    is another.

    layers: stacked (see `Leaf.stack`). per_layer: a tree of arrays whose first axis is the layer.
    Returns x and the tree with an axis in front, of the layers that have one; None if none has.
    """
    leaves, numbers = layer_leaves(arch) | adapter_leaves(arch, adaptable_kernels(arch)), []
    places = {stack: arch.layers_in(stack) for stack in STACKS}
    kept: dict[int, Any] = {}
    for run in layer_runs(arch.kinds()):
        # Indices of this run's layers in each stack.
        within = {
            stack: [at for at, layer in enumerate(own) if layer in _layers(run)]
            for stack, own in places.items()
        }
        stacks = {
            name: _cut(x, within[leaves[name].stack], run.repeats) for name, x in layers.items()
        }
        of_layers = jax.tree.map(
            lambda x, at=within["layers"], n=run.repeats: _cut(x, at, n), per_layer
        )

        def period(
            x: Array, of: Any, run: LayerRun = run
        ) -> tuple[Array, tuple[list[Any], dict[int, Any]]]:
            stacks, of_layers = of
            outputs: list[Any] = []
            keys: dict[int, Any] = {}
            for j in range(run.period):
                layer = run.first + j
                weights = {}
                for name, stack in stacks.items():
                    there = [
                        other
                        for other in places[leaves[name].stack]
                        if other in _layers(run)[: run.period]
                    ]
                    if layer in there:
                        weights[local_name(name)] = (
                            stack if len(there) == 1 else stack[there.index(layer)]
                        )
                own = of_layers if run.period == 1 else jax.tree.map(itemgetter(j), of_layers)
                attends_to = kept.get(arch.attends_to(layer))
                x, number, of_layer = step(layer, x, (weights, own), attends_to)
                outputs += [] if number is None else [number]
                keys |= {} if of_layer is None else {layer: of_layer}
            return x, (outputs, keys)

        x, (outputs, keys) = jax.lax.scan(period, x, (stacks, of_layers))
        if outputs:
            numbers.append(jax.tree.map(_in_order, *outputs))
        # A layer that others attend to is the only one of its kind: its run is of one layer.
        kept.update(jax.tree.map(itemgetter(0), keys))
    return x, jax.tree.map(lambda *runs: jnp.concatenate(runs), *numbers) if numbers else None


def _in_order(*of_period: Array) -> Array:
    """Returns numbers of a period's layers, each with an axis of repeats, in the order of layers."""
    return jnp.stack(of_period, 1).reshape(-1, *of_period[0].shape[1:])


def _layers(run: LayerRun) -> range:
    return range(run.first, run.first + run.count)


def _cut(x: Any, at: Sequence[int], repeats: int) -> Any:
    """Returns consecutive layers of a stack as [repeats, layers of one period, …], without the
    second axis for a period of one (it would copy the parameters and their gradients); None for no
    layers."""
    if not at:
        return None
    part = x if len(at) == len(x) else x[at[0] : at[-1] + 1]
    return part if len(at) == repeats else part.reshape(repeats, len(at) // repeats, *x.shape[1:])
