"""Attention that is not computed again where the rest of a block is.

For long sequences attention is most of a block's work and little of what it saves. Within a
checkpoint, what attention's backward pass needs is saved as if there were none, and the second
computation of the block takes its result from the first. (torch's selective checkpointing does this
for single operations, but not beside a compiler.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# What attention calls in place of its computation; None outside of such a checkpoint.
_within: ContextVar[Callable[[Callable[[], Tensor], bool], Tensor] | None] = ContextVar(
    "within", default=None
)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's first computation and of its recomputation."""
    results: list[Tensor] = []

    def compute(attend: Callable[[], Tensor], _: bool) -> Tensor:
        with saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            attended = attend()
        results.append(attended.detach())
        return attended

    def scope(within: Callable[[Callable[[], Tensor], bool], Tensor]) -> Iterator[None]:
        token = _within.set(within)
        try:
            yield
        finally:
            _within.reset(token)

    @contextmanager
    def first() -> Iterator[None]:
        yield from scope(compute)

    @contextmanager
    def again() -> Iterator[None]:
        kept = iter(results)
        yield from scope(lambda _, learns: next(kept).detach().requires_grad_(learns))

    return first(), again()


def attended(attend: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    """Returns the result of `attend`, or of its first call in a checkpoint that keeps it. inputs:
    what it is a function of."""
    within = _within.get()
    if within is None or not torch.is_grad_enabled():
        return attend()
    return within(attend, any(x.requires_grad for x in inputs))
