"""Stacks of layers between the order in which a mesh's stages have them (`Architecture.stacked`) and
that of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import layer_leaves


def stored_order(arch: Architecture, path: Sequence[str]) -> list[int]:
    """Returns for each place in the stack of a parameter its layer's place in the model's order; []
    for a parameter of no stack, or if the orders are one."""
    if arch.stages[1] == 1 or tuple(path[:1]) != ("layers",):
        return []
    stack = layer_leaves(arch)[path[-1]].stack
    own = arch.layers_in(stack)
    return [own.index(layer) for layer in arch.stacked(stack)]


def stored(arch: Architecture, path: Sequence[str], x: Any) -> Any:
    """Returns a stack, of numpy or JAX, that is in the model's order in that of the mesh's stages."""
    order = stored_order(arch, path)
    return x[np.array(order)] if order else x


def in_model_order(arch: Architecture, path: Sequence[str], x: Any) -> Any:
    """Returns such a stack that is in the order of stages in the model's."""
    order = stored_order(arch, path)
    return x[np.argsort(order)] if order else x
