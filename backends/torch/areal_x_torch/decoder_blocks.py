"""Compiles decoder blocks and checkpoints their activations, before a model is sharded.

Checkpointing is outside of the compiled program: attention runs outside of it, which a checkpoint
inside could not leave. The compiler itself saves products and recomputes the rest, so "products"
has nothing to add to it.
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
from areal_x_torch import delta_rule, kept_attention
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import recompute_contexts
from areal_x_torch.pipeline_schedule import in_flight

# Operations whose results "products" saves: products with kernels, experts' too, and attention, by
# parts of its kernels' names. Not bmm, which computes scores.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::_grouped_mm"}
ATTENTION = "attention", "flash_attn", "varlen_attn"
# Bytes saved per token relative to the outputs of its products, in bf16. Measured for Qwen3, Qwen2,
# Gemma 3 and a mixture of few experts: 4.0, 3.6, 5.3 and 5.4 if nothing is recomputed, and 1.4, 1.4,
# 1.4 and 2.2 with "products".
KEPT = {"nothing": 5.5, "products": 2.0}


def prepare(
    model: PreTrainedModel, config: TrainerConfig, dtype: torch.dtype, memory: int | None
) -> None:
    """Compiles blocks and checkpoints their activations as the config requires; those of a frozen
    model are only compiled.

    dtype: of activations. memory: bytes of a device; None if unknown.
    """
    if config.compile:
        decoder = set(inner_decoder(model).modules())  # a vision tower branches on lengths
        blocks = [block for block in blocks_of(model) if block in decoder]
        # One function for all blocks of a class, so that it is compiled once.
        kinds: set[Any] = {type(block) for block in blocks}
        compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in kinds}
        for block in blocks:
            block.forward = partial(compiled[type(block)], block)
    learns = any(x.requires_grad for x in model.parameters())
    if learns and not (config.compile and config.remat == "products"):
        recompute_as(model, config, dtype, memory)


def recompute_as(
    model: PreTrainedModel, config: TrainerConfig, dtype: torch.dtype, memory: int | None
) -> None:
    """Makes the backward pass recompute blocks as the config requires; see `prepare`."""
    recompute(
        model,
        partial(
            choose,
            config,
            dtype,
            product_width(model),
            free_bytes(model, config, memory),
            attention_bytes(model, dtype),
        ),
    )


def recompute(model: PreTrainedModel, how: Callable[[int], str]) -> None:
    """Makes the backward pass recompute blocks from their inputs. how: see `choose`, given the
    tokens of a pass."""
    for block in blocks_of(model):
        block.forward = partial(_again, block.forward, how)


def choose(
    config: TrainerConfig,
    dtype: torch.dtype,
    products: int,
    room: int | None,
    attention: int,
    tokens: int,
) -> str:
    """Returns what the backward pass recomputes for this many tokens of a block: "nothing", "products" (all but
    these and attention), "attention" (all but that) or "layers".

    "auto" takes the first that fits into the room, and "nothing" if the room is unknown. products:
    see `product_width`. attention: see `attention_bytes`.
    """
    if config.remat != "auto":
        return config.remat
    # A block's own tokens are a part of those whose heads and widths it computes a part of.
    parts = 1 if config.mesh.sequence else config.mesh.tensor
    of_products = tokens * products // parts * dtype.itemsize
    needed = {how: times * of_products for how, times in KEPT.items()}
    if config.compile:
        # The compiler recomputes what is elementwise.
        needed = {"nothing": needed["products"]}
    needed["attention"] = tokens * attention // parts
    return next((how for how, x in needed.items() if room is None or x <= room), "layers")


def product_width(model: PreTrainedModel) -> int:
    """Returns how many numbers per token the products of all blocks produce, counting only the
    experts that compute it."""
    experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    parameters = [x for block in blocks_of(model) for x in block.parameters() if x.ndim >= 2]
    # What a delta rule saves, in fp32, is as much as that of further products.
    further = 2 * delta_rule.saved_numbers(model) / KEPT["nothing"]
    return sum(x.shape[-2] * (experts if x.ndim == 3 else 1) for x in parameters) + int(further)


def attention_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Returns the bytes per token that are saved if all but attention is recomputed: queries, keys,
    values, what attention gives, and each block's input."""
    config = model.config.get_text_config()
    blocks = min(len(blocks_of(model)), config.num_hidden_layers)  # those of a stage
    # An embedding starts the stream. Between stages it is in fp32.
    embedding = model.get_input_embeddings().weight
    input_size = 4 if embedding is None else embedding.element_size()
    # Gemma 4's layers have heads of different widths.
    unlike = getattr(config, "is_heterogeneous", False)
    layers = [config.per_layer_config[i] if unlike else config for i in range(blocks)]
    of_attention = sum(map(numbers_of_attention, layers)) * dtype.itemsize
    return of_attention + blocks * config.hidden_size * input_size


def numbers_of_attention(layer: Any) -> int:
    """Returns the numbers per token of a layer's queries, keys, values and what attention gives.
    layer: its config."""
    heads = layer.num_attention_heads
    keys = values = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    if getattr(layer, "kv_lora_rank", None):  # latent attention: head_dim is that of rotations
        keys, values = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    return int((heads + kv_heads) * (keys + values))


def free_bytes(model: PreTrainedModel, config: TrainerConfig, memory: int | None) -> int | None:
    """Returns three fifths of a device's bytes that parameters, gradients and moments leave: the rest
    is for the head, gathered blocks and temporaries. With stages, those bytes for each of the
    micro-batches that the first stage keeps at once."""
    if memory is None:
        return None
    mesh = config.mesh
    parts = mesh.fsdp * mesh.expert * mesh.context * mesh.tensor  # of a stage's own layers
    state = (
        sum(x.numel() * (16 if x.requires_grad else x.element_size()) for x in model.parameters())
        // parts
    )
    free = max(memory - (0 if config.offload else state), 0) * 3 // 5
    return free if mesh.stage == 1 else int(free / in_flight(mesh.stage, mesh.stage_chunks))


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder blocks, by the class names that transformers lists.

    Raises: UserError if it lists none.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"transformers does not list the blocks of a {type(model).__name__}: train it in one"
            " process"
        )
    return blocks


def _again(
    forward: Callable[..., Any],
    choose: Callable[[int], str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    hidden: Tensor = next(iter((*args, *kwargs.values())))  # by name in Llama 4's tower
    how = choose(hidden.shape[:-1].numel()) if torch.is_grad_enabled() else "nothing"
    if how == "nothing":
        return forward(*args, **kwargs)
    again = partial(_contexts, how)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=again,
        **kwargs,
    )


def _contexts(how: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a block's first computation and of its recomputation."""
    first, again = recompute_contexts()
    if how == "layers":
        return first, again
    if how == "attention":
        keeps, takes = kept_attention.contexts()
    else:
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
