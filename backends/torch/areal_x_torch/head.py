"""The head: log-probabilities of given tokens without an array of tokens by vocabulary.

Chunks of positions are computed one after the other and again in the backward pass: at most [chunk, vocabulary] logits exist.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_x_torch.model import Head


def logprobs(
    hidden: Float[Tensor, "rows length features"],
    head: Head,
    tokens: Int[Tensor, "rows length"],
    wanted: Int[Tensor, " wanted"],
    temperature: float,
    chunk: int,
) -> Float[Tensor, "rows length"]:
    """log softmax(logits / temperature) of the tokens at the flat places `wanted`, in fp32; 0 at all others.

    A token is predicted from the hidden state one place before it: the shift by one happens here and nowhere else, so no place
    may be the first of a row. The logits are computed in the dtype of `hidden`.
    """
    flat_hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, wanted - 1)
    flat = tokens.reshape(-1).index_select(0, wanted)
    chosen = ChosenLogprobs.apply(flat_hidden, head.weight, head.bias, flat, temperature, chunk)
    return chosen.new_zeros(tokens.numel()).index_copy(0, wanted, chosen).reshape(tokens.shape)


class ChosenLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weightᵀ + bias) / temperature)[target], one number a position."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "positions features"],
        weight: Float[Tensor, "vocabulary features"],
        bias: Float[Tensor, " vocabulary"] | None,
        targets: Int[Tensor, " positions"],
        temperature: float,
        chunk: int,
    ) -> Float[Tensor, " positions"]:
        chosen, normaliser = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        for part in _parts(len(targets), chunk):
            logits = _logits(hidden[part], weight, bias, temperature)
            normaliser[part] = logits.logsumexp(-1)
            chosen[part] = logits.gather(1, targets[part, None])[:, 0]
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, " positions"]) -> tuple[Tensor | None, ...]:
        """d logp / d logits = (one-hot of the target - probabilities) / temperature."""
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        scaled = grad / ctx.temperature
        compute = weight.to(hidden.dtype)
        for part in _parts(len(targets), ctx.chunk):
            logits = _logits(hidden[part], weight, bias, ctx.temperature)
            grad_logits = (logits - normaliser[part, None]).exp_().mul_(-scaled[part, None])
            grad_logits.scatter_add_(1, targets[part, None], scaled[part, None])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, compute, out=grad_hidden[part])
            grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Float[Tensor, "positions vocabulary"]:
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float()
    return logits if temperature == 1 else logits / temperature


def _parts(positions: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, positions, chunk)]
