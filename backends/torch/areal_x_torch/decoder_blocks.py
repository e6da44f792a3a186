"""What is done to each decoder block before a model is spread: it is compiled, and the backward
pass computes it again.

It is computed again around what is compiled: attention runs outside of the compiled programs, which
a checkpoint within them could not leave. The compiler itself keeps products and computes the rest
again, so there "products" has nothing to add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from areal_x.errors import UserError
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_torch.experts import recompute_contexts

# Whose results "products" keeps: products with kernels, experts' too, and attention, by parts of
# the names of its kernels. Not bmm, which computes scores.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm"}
ATTENTION = "attention", "flash_attn"
# What is kept of each token, beside what its products give, in bf16: of Qwen3, Qwen2, Gemma 3 and a
# mixture of few experts 4.0, 3.6, 5.3 and 5.4 times as much where nothing is computed again, 1.4,
# 1.4, 1.4 and 2.2 with "products".
KEPT = {"nothing": 5.5, "products": 2.0}


def prepare(
    model: PreTrainedModel, config: TrainerConfig, dtype: torch.dtype, memory: int | None
) -> None:
    """Compiles blocks and has them computed again, as the config says; those of a frozen model are
    only compiled.

    dtype: of activations. memory: bytes of a device; None where it does not tell.
    """
    if config.compile:
        decoder = set(model.get_decoder().modules())  # what sees looks at lengths on the way
        blocks = [block for block in blocks_of(model) if block in decoder]
        # One function for all blocks of a class: of one each, each would be compiled.
        kinds: set[Any] = {type(block) for block in blocks}
        compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in kinds}
        for block in blocks:
            block.forward = partial(compiled[type(block)], block)
    learns = any(x.requires_grad for x in model.parameters())
    if learns and not (config.compile and config.remat == "products"):
        recompute(
            model,
            partial(choose, config, dtype, product_width(model), free_bytes(model, config, memory)),
        )


def recompute(model: PreTrainedModel, how: Callable[[int], str]) -> None:
    """Has the backward pass compute blocks again from what went into them. how: given the tokens of
    a pass, see `choose`."""
    for block in blocks_of(model):
        block.forward = partial(_again, block.forward, how)


def choose(
    config: TrainerConfig, dtype: torch.dtype, products: int, room: int | None, tokens: int
) -> str:
    """What the backward pass of so many tokens computes again: "nothing", "products" (all but
    these) or "layers".

    "auto" takes the first that fits into the room, and "nothing" where nobody knows it. products:
    see `product_width`.
    """
    if config.remat != "auto":
        return config.remat
    needed = tokens * products // config.mesh.tensor * dtype.itemsize
    fits = (how for how, times in KEPT.items() if room is None or times * needed <= room)
    how = next(fits, "layers")
    return "nothing" if config.compile and how == "products" else how


def product_width(model: PreTrainedModel) -> int:
    """How many numbers the products of all blocks give for each token, of experts those that
    compute it."""
    experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    parameters = [x for block in blocks_of(model) for x in block.parameters() if x.ndim >= 2]
    return sum(x.shape[-2] * (experts if x.ndim == 3 else 1) for x in parameters)


def free_bytes(model: PreTrainedModel, config: TrainerConfig, memory: int | None) -> int | None:
    """Half of the bytes that are left of a device beside parameters, gradients and moments: the
    other half is for the head, for gathered blocks and for what is computed on the way."""
    if memory is None:
        return None
    mesh = config.mesh
    parts = mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    state = (
        sum(x.numel() * (16 if x.requires_grad else x.element_size()) for x in model.parameters())
        // parts
    )
    return max(memory - (0 if config.offload else state), 0) // 2


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks, by the name that transformers gives their class.

    Raises: UserError where it names none.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"transformers does not say what the blocks of a {type(model).__name__} are: train it"
            " in one process"
        )
    return blocks


def _again(
    forward: Callable[..., Any],
    choose: Callable[[int], str],
    hidden: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    how = choose(hidden.shape[:-1].numel()) if torch.is_grad_enabled() else "nothing"
    if how == "nothing":
        return forward(hidden, *args, **kwargs)
    again = partial(_contexts, how)
    return checkpoint(
        forward,
        hidden,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=again,
        **kwargs,
    )


def _contexts(how: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """In which a block is computed first, and again."""
    first, again = recompute_contexts()
    if how == "layers":
        return first, again
    keeps, takes = create_selective_checkpoint_contexts(_policy)
    return _both(first, keeps), _both(again, takes)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    kept = name in PRODUCTS or any(part in name for part in ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
