"""How evenly a mixture's experts are used, and the step of a router's bias towards even use: pure
functions of the arrays of any backend.

load: how many of a step's trained tokens go through each expert of each layer.
"""

from __future__ import annotations

from areal_x.types import Array


def max_violation(load: Array) -> Array:
    """Returns the largest load over the mean, less 1, averaged over layers: 0 if all experts are
    used alike, and without tokens. Source: MaxVio, arXiv 2408.15664, eq. 4.

    load: [layers, experts], floating-point.
    """
    from array_api_compat import array_namespace

    xp = array_namespace(load)
    mean = xp.mean(load, axis=-1)
    over = xp.max(load, axis=-1) - mean
    return xp.mean(over / xp.maximum(mean, xp.full_like(mean, 1e-9)))


def bias_step(load: Array, rate: float) -> Array:
    """Returns what is added to the biases that routers choose experts by, rate · sign(mean load −
    load): experts above their layer's mean load are chosen less. Sources: auxiliary-loss-free
    balancing, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    load: [layers, experts], floating-point.
    """
    from array_api_compat import array_namespace

    xp = array_namespace(load)
    return rate * xp.sign(xp.mean(load, axis=-1, keepdims=True) - load)
