"""Products of numbers rounded to fp8 (`trainer.precision = 'fp8'`), as DeepSeek-V3 trains: e4m3 for
weights, activations and gradients, with a scale for each block.

    y = x · Wᵀ         tiles of 1 × 128 of x, along its features; blocks of 128 × 128 of W
    dx = dy · W        tiles of 1 × 128 of dy, along its features; the same blocks of W
    dW = dyᵀ · x       tiles of 128 × 1 of both, along tokens

The formulas are areal_x_jax.fp8's, to the bit, which says why scales are powers of two. Products are
those of areal_x_torch.fp8_products; experts' are of rounded numbers in bf16, with sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_x.hf import fp8_weights
from areal_x_torch import fp8_products
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import grouped, is_experts
from areal_x_torch.fp8_products import output, round_blocks, round_tiles
from areal_x_torch.split_linear import SplitLinear

# Linear layers of a decoder that stay in the compute precision, by the last parts of their names: what
# is published unrounded, and what is in no block.
EXACT = (*fp8_weights.EXACT, ".per_layer_model_projection")


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
            y = output(x, low if rounded else round_blocks(low))
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
        return output(x, rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, rounded), (of_x, of_weight) = ctx.saved_tensors, ctx.needs_input_grad
        d_x = fp8_products.of_input(gradient, rounded) if of_x else None
        return d_x, fp8_products.of_weight(gradient, x) if of_weight else None


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
