"""Products of numbers rounded to fp8 (`trainer.precision = 'fp8'`), as DeepSeek-V3 trains: e4m3 for
weights, activations and gradients, with a scale for each block.

    y = x · Wᵀ         tiles of 1 × 128 of x, along its features; blocks of 128 × 128 of W
    dx = dy · W        tiles of 1 × 128 of dy, along its features; the same blocks of W
    dW = dyᵀ · x       tiles of 128 × 1 of both, along tokens

The formulas are areal_x_jax.fp8's, to the bit, which says why scales are powers of two. Products of
rounded numbers are computed in bf16, with sums in fp32, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import grouped, is_experts
from areal_x_torch.split_linear import SplitLinear

BLOCK = 128
LARGEST = 448.0
LEAST = 2.0**-100  # a block of smaller numbers has the scale of this one
BIAS = 126  # of exponents, as indices of POWERS
POWERS = torch.tensor([2.0**exponent for exponent in range(-BIAS, BIAS + 1)])
# Linear layers of a decoder that stay in the compute precision, by the last parts of their names:
# routers, the few columns of gates and of a delta rule's steps, and what is in no block.
EXACT = (
    *(".gate", ".router", ".router.proj", ".shared_expert_gate", ".per_layer_model_projection"),
    *(".in_proj_ba", ".in_proj_b", ".in_proj_a"),
)


class Fp8Linear(SplitLinear):
    """A linear layer whose products are those of this file. rounded: its weight is already."""

    rounded = False

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, self.own("weight"), bias, self.rounded)


def install(model: PreTrainedModel) -> None:
    """Replaces the linear layers of a decoder's blocks, and marks its mixtures of experts."""
    decoder = inner_decoder(model)
    for name, module in list(decoder.named_modules()):
        if type(module) is nn.Linear and not f".{name}".endswith(EXACT):
            decoder.set_submodule(name, Fp8Linear(module))
        elif is_experts(module):
            module.multiply = grouped_product


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Rounds the weights of a model for inference once and for all. Rounding them again would change
    nothing."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.weight.copy_(round_blocks(module.weight))
            module.rounded = True
        elif hasattr(module, "multiply"):
            for kernels in (x for x in module.parameters(recurse=False) if x.ndim == 3):
                kernels.copy_(round_blocks(kernels))
            module.multiply = partial(grouped_product, rounded=True)


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


def _rounded(blocks: Float[Tensor, "*shape"], axes: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    """Rounds to e4m3 with one scale for what is reduced along these axes."""
    x = blocks.float()
    scale, inverse = scales(x.abs().amax(axes, keepdim=True))
    return ((x * inverse).to(torch.float8_e4m3fn).float() * scale).to(blocks.dtype)


def round_tiles(x: Float[Tensor, "*shape"], axis: int = -1) -> Float[Tensor, "*shape"]:
    """Returns x rounded in tiles of 128 along one of the last two axes, the last tile being shorter
    where it must; in the dtype of x."""
    length = x.shape[axis]
    whole = pad(x, (0, 0) * (-1 - axis) + (0, -length % BLOCK))
    rounded = _rounded(whole.unflatten(axis, (-1, BLOCK)), (axis,))
    return rounded.flatten(axis - 1, axis).narrow(axis, 0, length)


def round_blocks(
    weight: Float[Tensor, "*stack rows columns"],
) -> Float[Tensor, "*stack rows columns"]:
    """Returns weights rounded in blocks of 128 × 128, those at the ends being smaller where they
    must. Rounding them again changes nothing."""
    rows, columns = weight.shape[-2:]
    whole = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    rounded = _rounded(blocks, (-3, -1)).flatten(-2).flatten(-3, -2)
    return rounded[..., :rows, :columns]


@torch.compiler.disable  # torch 2.13 fails at the function below if the number of tokens differs
def product(
    x: Float[Tensor, "*_ features"],
    weight: Float[Tensor, "out features"],
    bias: Float[Tensor, " out"] | None,
    rounded: bool = False,
) -> Float[Tensor, "*_ out"]:
    """Returns the output of a linear layer, in the compute precision."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        x, low = x.to(dtype), weight.to(dtype)
        if torch.is_grad_enabled():
            y = _Product.apply(x, low if rounded else _Straight.apply(low, round_blocks))
        else:  # torch.jit cannot trace the function
            y = linear(round_tiles(x), low if rounded else round_blocks(low))
        return y if bias is None else y + bias.to(dtype)


def grouped_product(
    x: Float[Tensor, "n features"],
    kernels: Float[Tensor, "experts features out"],
    sizes: Int[Tensor, " experts"],
    rounded: bool = False,
) -> Float[Tensor, "n out"]:
    """`experts.grouped`; the gradient of the kernels is a product of the other two's tiles."""
    if not torch.is_grad_enabled():
        return grouped(round_tiles(x), kernels if rounded else round_blocks(kernels), sizes)
    own = kernels if rounded else _Straight.apply(kernels, round_blocks)
    y: Tensor = _OfGradient.apply(grouped(_Straight.apply(x, round_tiles), own, sizes))
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(x, rounded)
        return linear(round_tiles(x), rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, rounded), (of_x, of_weight) = ctx.saved_tensors, ctx.needs_input_grad
        d_x = round_tiles(gradient) @ rounded if of_x else None
        if not of_weight:
            return d_x, None
        along_tokens = (round_tiles(y.reshape(-1, y.shape[-1]), axis=-2) for y in (gradient, x))
        of_outputs, of_inputs = along_tokens
        return d_x, of_outputs.T @ of_inputs


class _Straight(torch.autograd.Function):
    """Rounding whose gradient is that of no rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        return how(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _OfGradient(torch.autograd.Function):
    """No rounding, whose gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return round_tiles(gradient)
