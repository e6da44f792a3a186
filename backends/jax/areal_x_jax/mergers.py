"""How the squares of patches that share a token become its embedding: the last part of vision towers,
and the projectors beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_x_jax.layer_parts import ACTIVATIONS, affine, unit_rms
from areal_x_jax.parameters import Params
from areal_x_jax.vision_architecture import VisionArchitecture


def merge(
    arch: VisionArchitecture,
    weights: Params,
    x: Float[Array, "rows capacity hidden"],
    joined_first: bool,
) -> Float[Array, "rows tokens out"]:
    """Merges merge² neighbouring patches into one embedding. joined_first: True if the norm is of
    the joined patches, False if of each."""
    joined = len(x), -1, arch.hidden * arch.merge**2
    x = norm(arch, weights, "norm", x.reshape(joined) if joined_first else x).reshape(joined)
    return affine(weights, "down", jax.nn.gelu(affine(weights, "up", x), approximate=False))


def pool(
    arch: VisionArchitecture, weights: Params, x: Float[Array, "rows capacity hidden"]
) -> Float[Array, "rows tokens out"]:
    """Averages merge² neighbouring patches, normalises the mean and projects it: Gemma 3's projector,
    whose norm's scale is 1 + its weight."""
    mean = x.reshape(len(x), -1, arch.merge**2, arch.hidden).mean(-2)
    y = unit_rms(mean.astype(jnp.float32), arch.merger_eps)
    y = y * (1.0 + weights["norm"].astype(jnp.float32))
    return affine(weights, "projection", y.astype(x.dtype))


def mix(
    arch: VisionArchitecture, weights: Params, x: Float[Array, "rows capacity hidden"]
) -> Float[Array, "rows tokens out"]:
    """Normalises patches, mixes merge² neighbours into one of the same width and projects it twice:
    Mistral 3's, whose kernel reads a feature of all neighbours before the next."""
    y = unit_rms(x.astype(jnp.float32), arch.merger_eps) * weights["norm"]
    squares = y.astype(x.dtype).reshape(len(x), -1, arch.merge**2, arch.hidden)
    y = affine(weights, "join", squares.swapaxes(-1, -2).reshape(*squares.shape[:2], -1))
    return affine(weights, "second", ACTIVATIONS["gelu"](affine(weights, "first", y)))


def scale_means(
    arch: VisionArchitecture,
    outside: Params,
    weights: Params,
    x: Float[Array, "rows capacity hidden"],
) -> Float[Array, "rows tokens out"]:
    """Averages merge² neighbouring patches, standardises the means, normalises and projects them:
    Gemma 4's, whose norm has no scale."""
    y = x.astype(jnp.float32).reshape(len(x), -1, arch.merge**2, arch.hidden).mean(-2)
    if arch.layers:
        y = y.astype(x.dtype).astype(jnp.float32) * arch.hidden**0.5
    if arch.standardized:
        bias, factor = (jax.lax.stop_gradient(outside[f"std_{x}"]) for x in ("bias", "scale"))
        y = (y - bias) * factor
    return affine(weights, "first", unit_rms(y.astype(x.dtype), arch.merger_eps))


def shuffle(
    arch: VisionArchitecture, weights: Params, x: Float[Array, "rows capacity hidden"]
) -> Float[Array, "rows tokens out"]:
    """Joins merge² neighbouring patches and projects them: Llama 4's pixel shuffle, adapter and
    projector."""
    y = x.reshape(len(x), -1, arch.hidden * arch.merge**2)
    for name in ("join_up", "join_down"):
        y = ACTIVATIONS["gelu"](affine(weights, name, y))
    return affine(weights, "project", y)


def norm(
    arch: VisionArchitecture, weights: Params, name: str, x: Float[Array, "... features"]
) -> Float[Array, "... features"]:
    """Layer norm or RMS norm, computed in fp32 whatever the input."""
    y = x.astype(jnp.float32)
    if arch.layer_norm:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + arch.eps) * weights[name]
    return (y + weights[f"{name}_bias"] if arch.layer_norm else y).astype(x.dtype)
