"""Products of numbers rounded to fp8 (`trainer.precision = 'fp8'`), as DeepSeek-V3 trains: e4m3 for
weights, activations and gradients, with a scale for each block.

    y = x · W          tiles of 1 × 128 of x, along its features; blocks of 128 × 128 of W
    dx = dy · Wᵀ       tiles of 1 × 128 of dy, along its features; the same blocks of W
    dW = xᵀ · dy       tiles of 128 × 1 of both, along tokens

A scale is the power of two with which the largest number of its block is at most 448, the largest of
e4m3: rounded numbers are then exact in bf16, and their products are computed so, with sums in fp32,
unless the device has units for them (areal_x_jax.fp8_products). The formulas are areal_x_torch.fp8's,
to the bit. Weights are rounded from the compute precision, in which they are published. Source: arXiv
2412.19437, sections 3.3.1 and 3.3.2 (powers of two there for some activations, in V3.1 for all).

Numbers of a mixture's experts are rounded alike, but their weights' gradients are products of the
tiles of the other two, along features, which needs no second rounding by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_x_jax import fp8_products, ragged_products
from areal_x_jax.leaf import local_name
from areal_x_jax.parameters import Params

BLOCK = 128
LARGEST = 448.0
LEAST = 2.0**-100  # a block of smaller numbers has the scale of this one

# Kernels of a layer; neither routers, nor the few columns of gates and of a delta rule's steps.
KERNELS = {
    *("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "kv_b", "o"),
    *("delta_qkvz", "delta_qkv", "delta_z", "delta_o"),
    *("gate", "up", "gate_up", "down", "shared_gate", "shared_up", "shared_down"),
    *("experts_gate", "experts_up", "experts_gate_up", "experts_down"),
    *("inputs_gate", "inputs_projection"),
}


@partial(jax.tree_util.register_dataclass, data_fields=["of"], meta_fields=["rounded"])
@dataclass(frozen=True)
class Kernel:
    """A kernel whose products are those of this file. rounded: it is already."""

    of: Array
    rounded: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


def marked(layer: Params, rounded: bool = False) -> Params:
    """Returns a layer's parameters with its KERNELS marked."""
    return {name: Kernel(x, rounded) if name in KERNELS else x for name, x in layer.items()}


def with_rounded_kernels(layers: Params) -> Params:
    """Returns stacked layers with their KERNELS rounded."""
    return {
        name: round_blocks(x) if local_name(name) in KERNELS else x for name, x in layers.items()
    }


def scales(
    largest: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Returns the scale of blocks with these largest magnitudes, and 1 / scale, both exact."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, LEAST) / LARGEST, jnp.int32)
    exponent = (bits + 0x7FFFFF) >> 23  # rounded up to a power of two
    both = exponent << 23, (254 - exponent) << 23
    scale, inverse = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in both)
    return scale, inverse


def scaled(
    blocks: Float[Array, "*shape"], axes: tuple[int, ...]
) -> tuple[Float[Array, "*shape"], Float[Array, "*kept"]]:
    """Returns e4m3 numbers with one scale for what is reduced along these axes, and the scales."""
    x = blocks.astype(jnp.float32)
    scale, inverse = scales(jnp.max(jnp.abs(x), axes, keepdims=True))
    # The barrier keeps the compiler from leaving out both conversions.
    return jax.lax.optimization_barrier((x * inverse).astype(jnp.float8_e4m3fn)), scale


def _rounded(blocks: Float[Array, "*shape"], axes: tuple[int, ...]) -> Float[Array, "*shape"]:
    low, scale = scaled(blocks, axes)
    return (low.astype(jnp.float32) * scale).astype(blocks.dtype)


def padded(x: Array, *axes: int) -> Array:
    """Returns x with these of its last axes filled up to whole blocks."""
    return jnp.pad(x, [(0, -n % BLOCK if i - x.ndim in axes else 0) for i, n in enumerate(x.shape)])


def round_tiles(x: Float[Array, "*shape"], axis: int = -1) -> Float[Array, "*shape"]:
    """Returns x rounded in tiles of 128 along one of the last two axes, the last tile being shorter
    where it must; in the dtype of x."""
    assert axis in (-1, -2)
    whole = padded(x, axis)
    *before, length = whole.shape[: whole.ndim + axis + 1]
    after = whole.shape[whole.ndim + axis + 1 :]
    tiles = whole.reshape(*before, length // BLOCK, BLOCK, *after)
    rounded = _rounded(tiles, (axis,)).reshape(whole.shape)
    return rounded[tuple(slice(n) for n in x.shape)]


def round_blocks(kernel: Float[Array, "*stack in out"]) -> Float[Array, "*stack in out"]:
    """Returns kernels rounded in blocks of 128 × 128, those at the ends being smaller where they
    must. Rounding them again changes nothing."""
    whole = padded(kernel, -1, -2)
    *stack, into, out = whole.shape
    blocks = whole.reshape(*stack, into // BLOCK, BLOCK, out // BLOCK, BLOCK)
    rounded = _rounded(blocks, (-3, -1)).reshape(whole.shape)
    return rounded[tuple(slice(n) for n in kernel.shape)]


def linear(x: Float[Array, "... in"], kernel: Kernel) -> Float[Array, "... out"]:
    product: Array = _linear(x, kernel.of if kernel.rounded else _straight_blocks(kernel.of))
    return product


@jax.custom_vjp
def _linear(x: Array, rounded: Array) -> Array:
    return fp8_products.output(x, rounded)


def _linear_forward(x: Array, rounded: Array) -> tuple[Array, tuple[Array, Array]]:
    return fp8_products.output(x, rounded), (x, rounded)


def _linear_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, rounded = saved
    gradient = jax.lax.optimization_barrier(gradient)
    return fp8_products.of_input(gradient, rounded), fp8_products.of_kernel(x, gradient)


_linear.defvjp(_linear_forward, _linear_backward)


def ragged_dot(
    x: Float[Array, "n in"], kernels: Kernel, sizes: Int[Array, " experts"]
) -> Float[Array, "n out"]:
    """The ragged product of a mixture's experts."""
    rounded = kernels.of if kernels.rounded else _straight_blocks(kernels.of)
    product: Array = _of_gradient(ragged_products.ragged_dot(_straight_tiles(x), rounded, sizes))
    return product


# Rounding whose gradient is that of no rounding.
_straight_blocks = jax.custom_vjp(round_blocks)
_straight_blocks.defvjp(lambda x: (round_blocks(x), None), lambda _, gradient: (gradient,))
_straight_tiles = jax.custom_vjp(lambda x: round_tiles(x))
_straight_tiles.defvjp(lambda x: (round_tiles(x), None), lambda _, gradient: (gradient,))
# And no rounding, whose gradient is rounded.
_of_gradient = jax.custom_vjp(lambda x: x)
_of_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (round_tiles(gradient),))
