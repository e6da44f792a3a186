"""Collectives with gradients, for groups of processes that all go on to compute the same loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup


class CopyToGroup(torch.autograd.Function):
    """Identity on a tensor that all processes have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class SumOverGroup(torch.autograd.Function):
    """Sum over processes; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherFromGroup(torch.autograd.Function):
    """Concatenates parts of equal size along the last axis; the gradient of each part is its
    slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


class AllToAll(torch.autograd.Function):
    """Exchanges rows between processes: `sent` rows for each, in their order, against `received`
    from each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.arguments = received, sent, group
        rows = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(grad, *ctx.arguments), None, None, None


class Exchange(torch.autograd.Function):
    """One of the functions of tokens below, the gradient of which is another: summed where each
    process computed a part of what became of all tokens, its own where each computed the same."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, there: OfTokens, back: OfTokens
    ) -> Tensor:
        ctx.arguments = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, back = ctx.arguments
        return back(grad, group), None, None, None


OfTokens: TypeAlias = Callable[[Tensor, ProcessGroup], Tensor]


def own_tokens(
    x: Float[Tensor, "*_ tokens features"], group: ProcessGroup
) -> Float[Tensor, "*_ own_tokens features"]:
    """Returns this process's tokens of those that all have."""
    return x.chunk(group.size(), -2)[group.rank()].contiguous()


def all_tokens(
    x: Float[Tensor, "*_ own_tokens features"], group: ProcessGroup
) -> Float[Tensor, "*_ tokens features"]:
    """Concatenates all processes' tokens."""
    rows = x.flatten(0, -2).contiguous()
    whole = rows.new_empty(len(rows) * group.size(), rows.shape[1])
    dist.all_gather_into_tensor(whole, rows, group=group)
    return whole.view(*x.shape[:-2], -1, x.shape[-1])


def summed_own_tokens(
    x: Float[Tensor, "*_ tokens features"], group: ProcessGroup
) -> Float[Tensor, "*_ own_tokens features"]:
    """Returns the sum over processes of this one's tokens."""
    rows = x.flatten(0, -2).contiguous()
    own = rows.new_empty(len(rows) // group.size(), rows.shape[1])
    dist.reduce_scatter_tensor(own, rows, group=group)
    return own.view(*x.shape[:-2], -1, x.shape[-1])
