"""The three products of a kernel in fp8 (areal_x_jax.fp8): by the device's own units for e4m3 where JAX
has a call for them, else of the same rounded numbers in the compute precision.

That call is jax.lax.scaled_dot, for GPUs of compute capability 10 (Blackwell), whose units take tiles of
32 numbers with scales that are powers of two (MXFP8): a tile of 128 is four with one scale, so that
operands are the same to the bit, and sums are the unit's. Others compute in bf16: JAX multiplies on
Hopper's units with one scale for a whole matrix only. Experimental: it never ran on a GPU. On a CPU the
same call gives the products of the rounded numbers, and a device where it does not computes in bf16,
with a warning.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_x_jax import fp8

MX_TILE = 32
CAPABILITY = 10.0  # from which on units take tiles with scales in e8m0


class Scaled(NamedTuple):
    """A matrix in e4m3, its columns padded to whole tiles: numbers [rows, columns], and scales [rows,
    columns / 128]."""

    numbers: Array
    scales: Array


def output(x: Float[Array, "... in"], rounded: Float[Array, "in out"]) -> Float[Array, "... out"]:
    """Returns x · W. rounded: W, rounded in blocks."""
    if not has_units():
        return fp8.round_tiles(x) @ rounded
    y = _multiplied(_in_tiles(_rows(x)), _in_blocks(rounded.T), x)
    return y.reshape(*x.shape[:-1], -1)


def of_input(
    gradient: Float[Array, "... out"], rounded: Float[Array, "in out"]
) -> Float[Array, "... in"]:
    """Returns the gradient of x, dy · Wᵀ."""
    if not has_units():
        return fp8.round_tiles(gradient) @ rounded.T
    d_x = _multiplied(_in_tiles(_rows(gradient)), _in_blocks(rounded), gradient)
    return d_x.reshape(*gradient.shape[:-1], -1)


def of_kernel(
    x: Float[Array, "... in"], gradient: Float[Array, "... out"]
) -> Float[Array, "in out"]:
    """Returns the gradient of W, xᵀ · dy, of both in tiles along tokens."""
    if not has_units():
        along_tokens = (fp8.round_tiles(_rows(part), axis=-2) for part in (x, gradient))
        return jax.lax.dot_general(*along_tokens, (((0,), (0,)), ((), ())))
    return _multiplied(_in_tiles(_rows(x).T), _in_tiles(_rows(gradient).T), x)


def _rows(x: Float[Array, "... columns"]) -> Float[Array, "rows columns"]:
    return x.reshape(-1, x.shape[-1])


def _in_tiles(x: Float[Array, "rows columns"]) -> Scaled:
    whole = fp8.padded(x, -1)
    tiles = whole.reshape(len(x), -1, fp8.BLOCK)
    numbers, scales = fp8.scaled(tiles, (-1,))
    return Scaled(numbers.reshape(whole.shape), scales[..., 0])


def _in_blocks(kernel: Float[Array, "rows columns"]) -> Scaled:
    whole = fp8.padded(kernel, -1, -2)
    rows, columns = whole.shape
    blocks = whole.reshape(rows // fp8.BLOCK, fp8.BLOCK, columns // fp8.BLOCK, fp8.BLOCK)
    numbers, scales = fp8.scaled(blocks, (-3, -1))
    of_rows = jnp.repeat(scales[:, 0, :, 0], fp8.BLOCK, axis=0)
    return Scaled(numbers.reshape(whole.shape)[: len(kernel)], of_rows[: len(kernel)])


def _multiplied(left: Scaled, right: Scaled, like: Array) -> Float[Array, "rows columns"]:
    """Returns left · rightᵀ on the device's units."""
    of_left, of_right = (
        jnp.repeat(x.scales, fp8.BLOCK // MX_TILE, axis=1).astype(jnp.float8_e8m0fnu)
        for x in (left, right)
    )
    y: Array = jax.lax.scaled_dot(
        left.numbers,
        right.numbers,
        lhs_scale=of_left,
        rhs_scale=of_right,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=like.dtype,
    )
    return y


@cache
def has_units() -> bool:
    """True if products are by the device's units. The first call computes one."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None or float(capability) < CAPABILITY:
        return False
    if (why := differs()) is not None:
        warnings.warn(f"products of fp8 are computed in bf16 on {device}: {why}", stacklevel=2)
    return why is None


def differs() -> str | None:
    """Returns why products of a device's units are not those of rounded numbers, None if they are."""
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0))
        x, w = (
            jax.random.normal(key, (n, 384), jnp.bfloat16)
            for key, n in zip(keys, (256, 128), strict=True)
        )
        try:
            found = jax.jit(lambda: _multiplied(_in_tiles(x), _in_blocks(w), x))()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{error}"
        exact = jnp.float32
        expected = fp8.round_tiles(x).astype(exact) @ fp8.round_blocks(w).astype(exact).T
        gap = float(jnp.abs(found.astype(exact) - expected).max() / jnp.abs(expected).max())
    return f"its own units' were {gap:.2g} of the largest away" if gap > 0.01 else None
