"""The head: log-probabilities of given tokens without an array of tokens by vocabulary, and a critic's values.

Chunks of positions are computed one after the other and again in the backward pass: at most [chunk, vocabulary] logits exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_x.types import Divergence
from areal_x_torch.model import Head


class Teacher(NamedTuple):
    """What a frozen model left behind at the same positions, its head, and how far from it is measured."""

    hidden: Float[Tensor, "positions teacher_features"]
    head: Head
    divergence: Divergence


def logprobs(
    hidden: Float[Tensor, "positions features"],
    head: Head,
    targets: Int[Tensor, " positions"],
    temperature: float,
    chunk: int,
    entropy: bool = False,
    teacher: Teacher | None = None,
) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"] | None, Float[Tensor, " positions"] | None]:
    """log softmax(logits / temperature) of the target at each position, in fp32; with `entropy` also that distribution's, and
    with a teacher its divergence, of both logits / temperature.

    `hidden` is what the token before the target left behind. The logits are computed in its dtype.
    """
    return ChosenLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, chunk, entropy, teacher)


def values(hidden: Float[Tensor, "positions features"], weight: Float[Tensor, "1 features"]) -> Float[Tensor, " positions"]:
    """One number a position, in fp32 whatever the dtype of `hidden`: next to a model it costs nothing."""
    return hidden.float() @ weight[0]


class ChosenLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weightᵀ + bias) / temperature)[target], one number a position; and -Σ p log p, and the divergence
    from a teacher, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "positions features"],
        weight: Float[Tensor, "vocabulary features"],
        bias: Float[Tensor, " vocabulary"] | None,
        targets: Int[Tensor, " positions"],
        temperature: float,
        chunk: int,
        wants_entropy: bool,
        teacher: Teacher | None,
    ) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"] | None, Float[Tensor, " positions"] | None]:
        chosen, normaliser, entropy, divergence = (torch.empty(len(targets), device=hidden.device) for _ in range(4))
        for part in _parts(len(targets), chunk):
            logits = _logits(hidden[part], weight, bias, temperature)
            if teacher is not None:
                divergence[part] = teacher.divergence(logits, _logits(teacher.hidden[part], *teacher.head, temperature))
            normaliser[part] = logits.logsumexp(-1)
            chosen[part] = logits.gather(1, targets[part, None])[:, 0]
            if wants_entropy:
                logp = logits.sub_(normaliser[part, None])
                entropy[part] = -(logp.exp().mul_(logp)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy if wants_entropy else None)
        ctx.temperature, ctx.chunk, ctx.teacher = temperature, chunk, teacher
        return chosen - normaliser, entropy if wants_entropy else None, None if teacher is None else divergence

    @staticmethod
    def backward(
        ctx: Any,
        grad: Float[Tensor, " positions"],
        grad_entropy: Float[Tensor, " positions"] | None,
        grad_divergence: Float[Tensor, " positions"] | None,
    ) -> tuple[Tensor | None, ...]:
        """Times the temperature: d logp / d logits = one-hot of the target - p, d entropy / d logits = -p (log p + entropy).

        The divergence may be any function: autograd differentiates it, a chunk at a time.
        """
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        scaled = grad / ctx.temperature
        compute = weight.to(hidden.dtype)
        for part in _parts(len(targets), ctx.chunk):
            logits = _logits(hidden[part], weight, bias, ctx.temperature)
            from_teacher = None
            if ctx.teacher is not None:
                from_teacher = _slope(ctx.teacher, logits, part, ctx.temperature, grad_divergence[part] / ctx.temperature)
            logp = logits.sub_(normaliser[part, None])
            slope = scaled[part, None]
            if entropy is not None:
                slope = slope + (logp + entropy[part, None]).mul_(grad_entropy[part, None] / ctx.temperature)
            grad_logits = logp.exp_().mul_(-slope)
            grad_logits.scatter_add_(1, targets[part, None], scaled[part, None])
            if from_teacher is not None:
                grad_logits += from_teacher
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, compute, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _slope(teacher: Teacher, logits: Tensor, part: slice, temperature: float, grad: Tensor) -> Float[Tensor, "positions vocab"]:
    """The gradient by the student's logits of the divergences of a part, each times its `grad`."""
    of_teacher = _logits(teacher.hidden[part], *teacher.head, temperature)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        divergence = teacher.divergence(logits, of_teacher)
    return torch.autograd.grad(divergence, logits, grad)[0]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Float[Tensor, "positions vocabulary"]:
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float()
    return logits if temperature == 1 else logits / temperature


def _parts(positions: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, positions, chunk)]
