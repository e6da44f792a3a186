"""An embedding of each token for each layer, beside that which the first layer reads (Gemma 4's
per-layer embeddings).

    token ──▶ a table's row, a part for each layer ───────┐
    embedding ──▶ kernel ──▶ a part for each layer, norm ─┴─ add ──▶ the layers' inputs

    a layer's output ──▶ kernel, activation ──× its input──▶ kernel, norm ──▶ added to the output
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.architecture import Architecture
from areal_x_jax.layer_parts import ACTIVATIONS, affine, linear, norm
from areal_x_jax.parameters import Params


def layer_inputs(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "*tokens"],
    x: Float[Array, "*tokens hidden"],
    shown: Bool[Array, "*tokens"] | None = None,
) -> Float[Array, "*tokens layers width"] | None:
    """Returns the inputs of all layers, or None for a model without. x: the tokens' embeddings, as the
    first layer reads them. shown: tokens of images, which have the row of padding in the table; as in
    transformers it is not trained."""
    width = arch.varied.inputs if arch.varied else 0
    if not width:
        return None
    rows = params["embed_inputs"][tokens if shown is None else jnp.where(shown, arch.pad, tokens)]
    if shown is not None:
        rows = jnp.where(shown[..., None], jax.lax.stop_gradient(rows), rows)
    of_token = rows * jnp.asarray(width**0.5, x.dtype)
    of_embedding = linear(x, params["inputs_projection"]) * jnp.asarray(arch.hidden**-0.5, x.dtype)
    of_token, of_embedding = (
        part.reshape(*tokens.shape, arch.layers, width) for part in (of_token, of_embedding)
    )
    both = norm(of_embedding, params["inputs_norm"], arch) + of_token
    return both * jnp.asarray(2**-0.5, x.dtype)


def add_input(
    arch: Architecture,
    layer: Params,
    x: Float[Array, "*tokens hidden"],
    own: Float[Array, "*tokens width"],
) -> Float[Array, "*tokens hidden"]:
    """Adds to a layer's output what it makes of its input."""
    y = ACTIVATIONS[arch.activation](affine(layer, "inputs_gate", x)) * own
    return x + norm(affine(layer, "inputs_projection", y), layer["inputs_norm"], arch)
