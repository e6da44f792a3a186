"""Small copies of a model that take no memory and are computed in a moment, for observing how the
model computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


def inner_decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the decoder without a head: Llama 4 has a whole language model inside, with its own."""
    found: nn.Module = model.get_decoder()
    return found.model if isinstance(found, GenerationMixin) else found


def make_dummy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy on the CPU, with random parameters, of a model on the meta device: the same
    widths, and as many of the decoder's first blocks as include one of every kind. A layer's other
    copies of its parameters exist while it computes, one at a time."""
    copy = deepcopy(model)
    decoder = inner_decoder(copy)
    for name, blocks in list(decoder.named_children()):
        if isinstance(blocks, nn.ModuleList) and type(blocks[0]).__name__ in (
            copy._no_split_modules or ()
        ):
            setattr(
                decoder, name, blocks[: _with_every_kind(blocks, copy.config.get_text_config())]
            )
    # One expert after another: a grouped product needs rows that do not overlap.
    copy.set_experts_implementation("eager")
    return randomised(copy)


def randomised(module: Module) -> Module:
    """Replaces what is on the meta device by random tensors on the CPU and returns the module."""
    random, made = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for part in module.modules():
        tensors: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for named in tensors:
            for name, x in named.items():
                if x is not None and x.is_meta:
                    made.setdefault(id(x), nn.Parameter(_random(x, random), requires_grad=False))
                    named[name] = made[id(x)]  # tied tensors stay tied
    return module


def _random(like: Tensor, random: torch.Generator) -> Tensor:
    """Returns overlapping windows of one line of random numbers: about 1 for a vector, else scaled
    so that products are about 1."""
    line = torch.randn(sum(like.shape) - like.ndim + 1, generator=random)
    line = 1 + 0.2 * line if like.ndim < 2 else line * like.shape[-1] ** -0.5
    return line.to(like.dtype).as_strided(like.shape, (1,) * like.ndim)


def _with_every_kind(blocks: nn.ModuleList, config: PreTrainedConfig) -> int:
    """Returns how many of the first blocks include every kind: blocks are of one kind if they are
    alike and have the same entries in the config's per-layer lists."""
    lists = [
        x for x in vars(config).values() if isinstance(x, list | tuple) and len(x) == len(blocks)
    ]
    kinds = [(_kind(block), *(str(x[i]) for x in lists)) for i, block in enumerate(blocks)]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Returns what distinguishes a block from others: its parts, their shapes and settings; not its
    index."""
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
