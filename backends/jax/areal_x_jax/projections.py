"""The queries, keys and values of a layer's input."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from areal_x_jax import latent_attention
from areal_x_jax.architecture import Architecture
from areal_x_jax.latent_attention import Latent
from areal_x_jax.layer_parts import affine, norm, unit_rms
from areal_x_jax.parameters import Params
from areal_x_jax.rotations import Rotation, rope


class Projected(NamedTuple):
    """One layer's rotated queries and keys, and values. keys: with the values, None for a layer that
    attends to those of another. gate: logits of the output's gates; None if it has none."""

    query: Float[Array, "... heads head_dim"]
    keys: (
        tuple[Float[Array, "... kv_heads head_dim"], Float[Array, "... kv_heads value_dim"]] | None
    )
    gate: Float[Array, "... features"] | None


def project_qkv(
    arch: Architecture, layer: Params, x: Float[Array, "... hidden"], rotation: Rotation
) -> Projected:
    """Returns the queries, keys and values of one layer's input."""
    if "input_norm" in layer:
        x = norm(x, layer["input_norm"], arch)
    if arch.latent is not None:
        query, *keys = project_latent(arch, arch.latent, layer, x, rotation)
        return Projected(query, (keys[0], keys[1]), None)
    if "qkv" in layer:
        ends = np.cumsum([arch.heads, arch.kv_heads]) * arch.head_dim
        query, key, value = jnp.split(affine(layer, "qkv", x), ends, axis=-1)
    else:
        query = affine(layer, "q", x)
        key = affine(layer, "k", x) if "k" in layer else None
        value = affine(layer, "v", x) if "v" in layer else key

    gate = None
    if arch.gated:  # each head's query and gate are neighbours
        query, gate = jnp.split(query.reshape(*query.shape[:-1], arch.heads, -1), 2, axis=-1)
        query, gate = (part.reshape(*x.shape[:-1], -1) for part in (query, gate))

    head_dim = query.shape[-1] // arch.heads  # layers may differ in it

    def by_head(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, head_dim)

    def rotated(x: Array, name: str) -> Array:
        x = x if arch.wide_qk_norm else by_head(x)
        x = norm(x, layer[name], arch) if name in layer else x
        x = rope(by_head(x) if arch.wide_qk_norm else x, rotation, arch.interleaved)
        return x if rotation.unit is None else jnp.where(rotation.unit, unit_rms(x, arch.eps), x)

    query = rotated(query, "q_norm")
    if rotation.factor is not None:
        query = (query * rotation.factor).astype(query.dtype)
    if key is None:
        return Projected(query, None, gate)
    value = by_head(value)
    if arch.varied is not None:
        value = unit_rms(value, arch.eps)
    return Projected(query, (rotated(key, "k_norm"), value), gate)


def project_latent(
    arch: Architecture,
    latent: Latent,
    layer: Params,
    x: Float[Array, "... hidden"],
    rotation: Rotation,
) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values of latent attention (areal_x_jax.latent_attention), of a
    normalised input. The products of queries and keys do not depend on the order of features: rotated ones are the last."""
    of_vectors = replace(arch, eps=latent_attention.EPS)

    def by_head(x: Array, *widths: int) -> list[Array]:
        return jnp.split(x.reshape(*x.shape[:-1], arch.heads, -1), np.cumsum(widths), axis=-1)

    if "q_a" in layer:
        query = affine(layer, "q_b", norm(affine(layer, "q_a", x), layer["q_a_norm"], of_vectors))
    else:
        query = affine(layer, "q", x)
    vector, shared_key = jnp.split(affine(layer, "kv_a", x), [latent.rank], axis=-1)
    both = affine(layer, "kv_b", norm(vector, layer["kv_a_norm"], of_vectors))
    query, turned = by_head(query, latent.plain)
    key, value = by_head(both, latent.plain)
    turned, shared_key = (
        rope(x, rotation, arch.interleaved) for x in (turned, shared_key[..., None, :])
    )
    shared_key = jnp.broadcast_to(shared_key, (*key.shape[:-1], latent.rotated))
    query, key = (jnp.concatenate(parts, axis=-1) for parts in ((query, turned), (key, shared_key)))
    return query, key, value


def gated(attended: Float[Array, "... features"], gate: Array | None) -> Array:
    """Multiplies attention's output with its gates."""
    return attended if gate is None else attended.astype(gate.dtype) * jax.nn.sigmoid(gate)
