"""Rotary positions: what they do to the queries and keys of tokens. (areal_x_jax.rope reads them from
configs.)"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.architecture import Architecture
from areal_x_jax.rope import Rope


class Rotation(NamedTuple):
    """What the positions of tokens do to queries and keys: cosine and sine of angles [..., 1, rotated
    / 2]; a factor of queries [..., 1, 1] (`Architecture.temperature`); and whether both are divided
    by their RMS (`Architecture.unit_qk`), None where no layer has these."""

    cos: Float[Array, "*_ 1 half"]
    sin: Float[Array, "*_ 1 half"]
    factor: Float[Array, "*_ 1 1"] | None = None
    unit: Bool[Array, ""] | None = None


def position_rotations(arch: Architecture, positions: Int[Array, ...]) -> tuple[Rotation, ...]:
    """Returns, for each of the architecture's ropes, what it does at each position."""
    at = positions[..., None, None].astype(jnp.float32)

    def rotation(rope: Rope) -> Rotation:
        angle = at * rope.frequencies(arch.rotary_dim)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if rope.scale != 1:
            cos, sin = cos * rope.scale, sin * rope.scale
        factor, turns = None, rope.kind != "none"
        if arch.temperature is not None:
            slope, length = arch.temperature
            factor = 1 + slope * jnp.log1p(jnp.floor((at + 1) / length))
            factor = jnp.ones_like(factor) if turns else factor
        return Rotation(cos, sin, factor, jnp.asarray(turns) if arch.unit_qk else None)

    return tuple(map(rotation, arch.ropes))


def rope(
    x: Float[Array, "... heads head_dim"], rotation: Rotation, interleaved: bool = False
) -> Float[Array, "... heads head_dim"]:
    """Rotary position embedding of the first features, as many as the rotation has, with their
    halves as pairs. Source: arXiv 2104.09864.

    interleaved: neighbouring features are pairs. They are returned as halves: queries and keys in
    the same order have the same products in any.
    """
    cos, sin = (part.astype(x.dtype) for part in rotation[:2])
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)
