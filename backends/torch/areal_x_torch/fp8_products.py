"""The three products of a linear layer in fp8 (areal_x_torch.fp8): by the device's own units for e4m3
where it has them, else of the same rounded numbers in the compute precision.

    compute capability   units take                        scales
    9.0 (Hopper)         tiles of 1 × 128, blocks of 128   as they are, fp32
    10.0 (Blackwell)     tiles of 1 × 32 (MXFP8)           powers of two as e8m0, each for four tiles

Operands are the same to the bit, as scales are powers of two; sums are the unit's. Others, such as Ada
with scales of whole rows, compute in bf16. Experimental: it never ran on a GPU. The calls were compared
with torch's own checks of them and with a product on a CPU of the operands that they get, and a device
whose first product is not that of rounded numbers computes in bf16, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear, pad

BLOCK = 128
LARGEST = 448.0
LEAST = 2.0**-100  # a block of smaller numbers has the scale of this one
BIAS = 126  # of exponents, as indices of POWERS
POWERS = torch.tensor([2.0**exponent for exponent in range(-BIAS, BIAS + 1)])
MX_TILE = 32


class Scaled(NamedTuple):
    """A matrix in e4m3, padded to whole blocks: its numbers [rows, columns], and scales [rows, columns
    / 128] or, of blocks, [rows / 128, columns / 128]."""

    numbers: Tensor
    scales: Tensor


Call: TypeAlias = Callable[[Scaled, Scaled], Tensor]
"""Returns left · rightᵀ in bfloat16, of matrices with tiles along their columns; right may have
blocks."""


# ---- rounding


def scales(
    largest: Float[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Returns the scale of blocks with these largest magnitudes, and 1 / scale, both exact."""
    quotient = largest.clamp(min=LEAST) / LARGEST
    if torch.jit.is_tracing():  # the sampler's graph, which has no views as integers
        mantissa, exponent = torch.frexp(quotient)
        exponent = exponent - (mantissa == 0.5).int()  # rounded up to a power of two
        powers = POWERS.to(largest.device)
        return powers[exponent + BIAS], powers[BIAS - exponent]
    bits = (quotient.view(torch.int32) + 0x7FFFFF) >> 23  # the same, faster
    return (bits << 23).view(torch.float32), ((254 - bits) << 23).view(torch.float32)


def _scaled(
    blocks: Float[Tensor, "*shape"], axes: tuple[int, ...]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*kept"]]:
    """Returns e4m3 numbers with one scale for what is reduced along these axes, and the scales."""
    x = blocks.float()
    scale, inverse = scales(x.abs().amax(axes, keepdim=True))
    return (x * inverse).to(torch.float8_e4m3fn), scale


def _rounded(blocks: Float[Tensor, "*shape"], axes: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    numbers, scale = _scaled(blocks, axes)
    return (numbers.float() * scale).to(blocks.dtype)


def _tiles_of(x: Float[Tensor, "*shape"], axis: int) -> Tensor:
    """Returns x padded and with this axis in tiles of 128, which are the axis after it."""
    whole = pad(x, (0, 0) * (-1 - axis) + (0, -x.shape[axis] % BLOCK))
    return whole.unflatten(axis, (-1, BLOCK))


def _blocks_of(weight: Float[Tensor, "*stack rows columns"]) -> Tensor:
    rows, columns = weight.shape[-2:]
    whole = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return whole.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def round_tiles(x: Float[Tensor, "*shape"], axis: int = -1) -> Float[Tensor, "*shape"]:
    """Returns x rounded in tiles of 128 along one of the last two axes, the last tile being shorter
    where it must; in the dtype of x."""
    rounded = _rounded(_tiles_of(x, axis), (axis,))
    return rounded.flatten(axis - 1, axis).narrow(axis, 0, x.shape[axis])


def round_blocks(
    weight: Float[Tensor, "*stack rows columns"],
) -> Float[Tensor, "*stack rows columns"]:
    """Returns weights rounded in blocks of 128 × 128, those at the ends being smaller where they
    must. Rounding them again changes nothing."""
    rows, columns = weight.shape[-2:]
    rounded = _rounded(_blocks_of(weight), (-3, -1)).flatten(-2).flatten(-3, -2)
    return rounded[..., :rows, :columns]


def in_tiles(x: Float[Tensor, "rows columns"]) -> Scaled:
    """Returns a matrix in tiles of 1 × 128. Rows are padded too."""
    numbers, scale = _scaled(_tiles_of(pad(x, (0, 0, 0, -len(x) % BLOCK)), -1), (-1,))
    return Scaled(numbers.flatten(-2), scale.squeeze(-1))


def in_blocks(weight: Float[Tensor, "rows columns"]) -> Scaled:
    """Returns a matrix in blocks of 128 × 128."""
    numbers, scale = _scaled(_blocks_of(weight), (-3, -1))
    return Scaled(numbers.flatten(-2).flatten(-3, -2), scale.squeeze(-1).squeeze(-2))


# ---- products


def output(
    x: Float[Tensor, "*_ features"], rounded: Float[Tensor, "out features"]
) -> Float[Tensor, "*_ out"]:
    """Returns x · Wᵀ. rounded: W, rounded in blocks."""
    if (call := call_of(x)) is None:
        return linear(round_tiles(x), rounded)
    rows = x.reshape(-1, x.shape[-1])
    y = call(in_tiles(rows), in_blocks(rounded))[: len(rows), : len(rounded)]
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def of_input(
    gradient: Float[Tensor, "*_ out"], rounded: Float[Tensor, "out features"]
) -> Float[Tensor, "*_ features"]:
    """Returns the gradient of x, dy · W."""
    if (call := call_of(gradient)) is None:
        return round_tiles(gradient) @ rounded
    rows, features = gradient.reshape(-1, gradient.shape[-1]), rounded.shape[1]
    d_x = call(in_tiles(rows), in_blocks(rounded.T))[: len(rows), :features]
    return d_x.to(gradient.dtype).view(*gradient.shape[:-1], -1)


def of_weight(
    gradient: Float[Tensor, "*_ out"], x: Float[Tensor, "*_ features"]
) -> Float[Tensor, "out features"]:
    """Returns the gradient of W, dyᵀ · x, of both in tiles along tokens."""
    dy, rows = (y.reshape(-1, y.shape[-1]) for y in (gradient, x))
    if (call := call_of(x)) is None:
        return round_tiles(dy, axis=-2).T @ round_tiles(rows, axis=-2)
    d_w = call(in_tiles(dy.T), in_tiles(rows.T))[: dy.shape[1], : rows.shape[1]]
    return d_w.to(x.dtype)


def call_of(x: Tensor) -> Call | None:
    """Returns what multiplies on the units of a tensor's device; None if products are of rounded
    numbers."""
    if x.numel() == 0 or torch.jit.is_tracing():
        return None
    return _of_device(x.device)


@cache
def _of_device(device: torch.device) -> Call | None:
    if device.type != "cuda" or not hasattr(functional, "scaled_mm"):
        return None
    call = CALLS.get(torch.get_device_module(device).get_device_capability(device)[0])
    if call is None:
        return None
    why = _differs(call, device)
    if why is not None:
        warnings.warn(f"products of fp8 are computed in bf16 on {device}: {why}", stacklevel=2)
        return None
    return call


def _differs(call: Call, device: torch.device) -> str | None:
    """Returns why products of a device's units are not those of rounded numbers, None if they are."""
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, 384, device=device, generator=generator).bfloat16() for n in (256, 128))
    for right, rounded in ((in_blocks(w), round_blocks(w)), (in_tiles(w), round_tiles(w))):
        try:
            found = call(in_tiles(x), right).float()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{error}"
        expected = round_tiles(x).float() @ rounded.float().T
        # Units of Hopper sum 32 products at a time with 14 bits.
        if (gap := float((found - expected).abs().max() / expected.abs().max())) > 0.01:
            return f"its own units' were {gap:.2g} of the largest away"
    return None


def by_tiles(left: Scaled, right: Scaled) -> Tensor:
    """Multiplies on units that take tiles of 1 × 128 and blocks of 128 × 128."""
    kinds = functional.ScalingType
    if len(right.scales) == len(right.numbers):
        kind, of_right = kinds.BlockWise1x128, _by_columns(right.scales)
    else:
        # The columns of blocks [columns / 128, rows / 128], padded to a multiple of four.
        kind = kinds.BlockWise128x128
        of_right = _by_columns(pad(right.scales.T, (0, 0, 0, -right.scales.shape[1] % 4)))
    return functional.scaled_mm(
        left.numbers,
        right.numbers.T,
        _by_columns(left.scales),
        kinds.BlockWise1x128,
        of_right,
        kind,
        output_dtype=torch.bfloat16,
    )


def _by_columns(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Returns the same matrix, one column after the other in memory."""
    return x.T.contiguous().T


def by_mx_tiles(left: Scaled, right: Scaled) -> Tensor:
    """Multiplies on units that take tiles of 1 × 32 with scales in e8m0."""
    kinds, swizzles = functional.ScalingType, functional.SwizzleType
    return functional.scaled_mm(
        left.numbers,
        right.numbers.T,
        _swizzled(left),
        kinds.BlockWise1x32,
        _swizzled(right),
        kinds.BlockWise1x32,
        swizzle_a=swizzles.SWIZZLE_32_4_4,
        swizzle_b=swizzles.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )


def _swizzled(x: Scaled) -> Tensor:
    """Returns the scales of tiles of 1 × 32 in cuBLAS' order: of 128 rows and four tiles, row r of 32, then
    rows r + 32, r + 64 and r + 96, each with its four."""
    rows = x.scales.repeat_interleave(len(x.numbers) // len(x.scales), dim=0)
    # Four tiles of 32 are one of 128.
    each = rows.repeat_interleave(BLOCK // MX_TILE, dim=1).to(torch.float8_e8m0fnu)
    apart = each.view(torch.uint8).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))
    return apart.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


# By the first number of the compute capability.
CALLS: dict[int, Call] = {9: by_tiles, 10: by_mx_tiles}
