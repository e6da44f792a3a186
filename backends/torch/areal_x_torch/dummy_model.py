"""Copies of a model, or of a part of it, that take no memory and are computed in a moment: on them
one sees how such a model computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


def make_dummy(model: PreTrainedModel) -> PreTrainedModel:
    """A model on the meta device with random parameters, on the CPU, of the same widths; of its
    decoder the first blocks, as many as it takes to have one of every kind. Other copies of its
    parameters exist while a layer computes, one at a time."""
    copy = deepcopy(model)
    decoder = copy.get_decoder()
    for name, blocks in list(decoder.named_children()):
        if isinstance(blocks, nn.ModuleList) and type(blocks[0]).__name__ in (
            copy._no_split_modules or ()
        ):
            setattr(
                decoder, name, blocks[: _with_every_kind(blocks, copy.config.get_text_config())]
            )
    # one expert after the other: a grouped product wants rows that do not overlap
    copy.set_experts_implementation("eager")
    return randomised(copy)


def randomised(module: Module) -> Module:
    """The same module; what of it was on the meta device is random, on the CPU."""
    random, made = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for part in module.modules():
        tensors: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for named in tensors:
            for name, x in named.items():
                if x is not None and x.is_meta:
                    made.setdefault(id(x), nn.Parameter(_random(x, random), requires_grad=False))
                    named[name] = made[id(x)]  # what was tied is
    return module


def _random(like: Tensor, random: torch.Generator) -> Tensor:
    """One line of random numbers, of which every row is the next window: about 1 in a vector, else
    such that products are."""
    line = torch.randn(sum(like.shape) - like.ndim + 1, generator=random)
    line = 1 + 0.2 * line if like.ndim < 2 else line * like.shape[-1] ** -0.5
    return line.to(like.dtype).as_strided(like.shape, (1,) * like.ndim)


def _with_every_kind(blocks: nn.ModuleList, config: PreTrainedConfig) -> int:
    """How many of the first blocks there are until all kinds are among them: of blocks that are
    alike, and to which the config says the same in its lists of one entry a layer."""
    lists = [
        x for x in vars(config).values() if isinstance(x, list | tuple) and len(x) == len(blocks)
    ]
    kinds = [(_kind(block), *(str(x[i]) for x in lists)) for i, block in enumerate(blocks)]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What tells a block from others: its parts, their shapes and what they are told; not which one
    it is."""
    parts = []
    for name, module in block.named_modules():
        told = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, bool | int | float | str) and k != "layer_idx"
        }
        shapes = [(k, tuple(x.shape)) for k, x in module.named_parameters(recurse=False)]
        parts.append((name, type(module), *sorted(told.items(), key=str), *shapes))
    return tuple(parts)
