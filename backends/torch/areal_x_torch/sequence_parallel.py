"""Sequence parallelism: within a tensor group, each process has a part of a row's tokens between
the layers that are split by heads or width, where all of them would have the same (Korthikanti et
al. 2022, arXiv 2205.05198).

    own tokens ──norm──▶ gather ──▶ own heads ──▶ reduce-scatter ──add──▶ own tokens ──norm──▶ …

A gather and a reduce-scatter send the bytes of the one sum that they replace. Of norms, and whatever
else is computed of single tokens, each process has the gradient of its own tokens, which the
trainer sums. A part of a block that is not split as a whole (a mixture, latent attention, a gated
delta rule) is computed as without this, for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf.image_format import takes_images
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_torch.collectives import Exchange, all_tokens, own_tokens, summed_own_tokens
from areal_x_torch.decoder_blocks import blocks_of
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.split_linear import SplitLinear


def check(config: TrainerConfig, model: PreTrainedModel) -> None:
    """Raises: ConfigError for what tokens cannot be exchanged in."""
    why = None
    if config.mesh.stage > 1:
        why = "mesh.stage > 1, whose stages exchange whole rows"
    elif config.compile:
        why = "trainer.compile, whose programs contain no exchange of tokens"
    elif takes_images(model.config):
        why = "a model with images, which enter between its layers"
    if config.mesh.sequence and why is not None:
        raise ConfigError("mesh.sequence", True, f"False with {why}")


def install(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Has the blocks of a decoder, whose layers are split and not sharded yet, exchange tokens. Marks
    the parameters of which each process has the gradient of its own tokens (`own_token_parameters`)."""
    decoder = set(inner_decoder(model).modules())
    blocks = [block for block in blocks_of(model) if block in decoder]

    def to_all(x: Tensor) -> Tensor:
        found: Tensor = Exchange.apply(x, group, all_tokens, own_tokens)
        return found

    def to_own(x: Tensor) -> Tensor:
        found: Tensor = Exchange.apply(x, group, own_tokens, all_tokens)
        return found

    def to_split(x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # as the products would cast it
            x = x.to(torch.get_autocast_dtype(kind))
        found: Tensor = Exchange.apply(x, group, all_tokens, summed_own_tokens)
        return found

    _on_inputs(blocks[0], to_own)
    _on_outputs(blocks[-1], to_all)
    summed: list[nn.Parameter] = []
    for block in blocks:
        summed += block.parameters(recurse=False)
        router = getattr(block, "router", None)  # Gemma 4's, beside its experts and not with them
        if hasattr(block, "per_layer_input_gate"):
            block.register_forward_pre_hook(partial(_own_layer_input, to_own))
        for child in block.children():
            layers = [x for x in child.children() if isinstance(x, nn.Linear)]
            if is_split_as_a_whole(child, layers):
                _on_inputs(child, to_split)
                for layer in layers:
                    layer.tokens_apart = True
                summed += [x.bias for x in layers if x.bias is not None and not x.by_rows]
                others = (p for x in child.children() if x not in layers for p in x.parameters())
                summed += [p for p in others if not isinstance(p, DTensor)]  # else split by heads
            elif isinstance(child, nn.Linear) or all(p.ndim < 2 for p in child.parameters()):
                summed += child.parameters()  # a norm, or a product that is not split
            elif child is router:  # whose choice the experts need for all tokens
                _on_inputs(child, to_all)
            else:
                _on_inputs(child, to_all)
                _on_outputs(child, to_own)
    ids = {id(p) for p in summed}
    model.own_token_parameters = [name for name, p in model.named_parameters() if id(p) in ids]


def is_split_as_a_whole(child: nn.Module, layers: list[Any]) -> bool:
    """True for an attention or an MLP of which every product is split, first by columns, then by
    rows."""
    by_rows = {x.by_rows for x in layers if isinstance(x, SplitLinear) and x.others is not None}
    apart = all(isinstance(x, SplitLinear) and x.others is not None for x in layers)
    inside = {id(p) for x in layers for p in x.parameters()}
    rest = [p for p in child.parameters() if id(p) not in inside]
    return apart and by_rows == {True, False} and all(p.ndim < 2 for p in rest)


def _on_inputs(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def changed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(changed, with_kwargs=True)


def _own_layer_input(to_own: Callable[[Tensor], Tensor], _: nn.Module, args: Any) -> Any:
    """Runs before a block of Gemma 4, whose second input is the embeddings for this layer."""
    hidden, of_layer, *others = args
    return hidden, to_own(of_layer), *others


def _on_outputs(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def changed(_: nn.Module, __: Any, outputs: Any) -> Any:
        if isinstance(outputs, tuple):
            return change(outputs[0]), *outputs[1:]
        return change(outputs)

    module.register_forward_hook(changed)
