"""What is computed with a causal language model of transformers, or a sequence classifier, and its
tensors under their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from areal_x_torch.attention import Segments
from areal_x_torch.dtensors import ShardedView
from areal_x_torch.experts import Routing, routing_scope
from areal_x_torch.images import RowImages, embed_images

SCORE = "score.weight"  # what a sequence classifier has in place of a language model's head
# how the names end of what stands beside a frozen model's own tensors
ADAPTER = ".lora_A.weight", ".lora_B.weight"


class PackedRow(NamedTuple):
    """Sequences one after the other, each with positions from 0 on; of a model that sees, three and
    perhaps images. routing: what a mixture's routers are to do."""

    tokens: Int[Tensor, " tokens"]
    positions: Int[Tensor, "*3 tokens"]
    segments: Segments
    seen: RowImages | None = None
    routing: Routing | None = None


class Head(NamedTuple):
    """What turns the last hidden states into logits, or into one score.

    softcap: logits are softcap · tanh(product / softcap); 0 leaves them as they are. others: the
    processes that have the rest of the vocabulary, in the order of its words; None where it is all
    here.
    """

    weight: Float[Tensor, "vocabulary features"]
    bias: Float[Tensor, " vocabulary"] | None
    softcap: float = 0.0
    others: ProcessGroup | None = None

    def logits(self, hidden: Float[Tensor, "*_ features"]) -> Float[Tensor, "*_ vocabulary"]:
        """In the dtype of `hidden`; the weights may be of another."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return softcapped(
            nn.functional.linear(hidden, self.weight.to(hidden.dtype), bias), self.softcap
        )


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Float[Tensor, "tokens features"]:
    """What the head reads at each token of a flat row."""
    read = {"input_ids": row.tokens[None]}
    if has_vision(model):
        read = embed_images(
            model.base_model, model.get_input_embeddings()(row.tokens[None]), row.seen
        )
    # One row: of positions, and of those in three directions.
    with routing_scope(row.routing):
        states = decoder(model)(
            **read, position_ids=row.positions.unsqueeze(-2), use_cache=False, segments=row.segments
        )
    return states.last_hidden_state[0]


def decoder(model: PreTrainedModel) -> nn.Module:
    """What reads text: of a model that sees the part behind its tower."""
    found: nn.Module = model.base_model.language_model if has_vision(model) else model.base_model
    return found


def head_layer(model: PreTrainedModel) -> nn.Module:
    layer: nn.Module = model.score if is_classifier(model) else model.get_output_embeddings()
    return layer


def head(model: PreTrainedModel) -> Head:
    layer = head_layer(model)
    return Head(layer.weight, layer.bias, softcap_of(model))


def softcap_of(model: PreTrainedModel) -> float:
    """Of a language model's logits; 0 where it has none."""
    found = (
        None
        if is_classifier(model)
        else getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    )
    return float(found or 0.0)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens it knows."""
    return int(model.config.get_text_config().vocab_size)


def has_vision(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "vision_config")


def is_classifier(model: PreTrainedModel) -> bool:
    return hasattr(model, "score")


def state_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model's state is made of, under its own names, without copying: a tied head once,
    under the embedding's name."""
    buffers = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    named = [
        *model.named_parameters(),
        *((name, model.get_buffer(name)) for name in sorted(buffers)),
    ]
    return {name: x.detach() for name, x in named}


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor | ShardedView]:
    """The same under the names that `save_pretrained` would write."""
    return as_saved(model, state_tensors(model))


def as_saved(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor | ShardedView]:
    """Tensors that lie as the model's of these names do, under the names of its files, as views: a
    mixture's experts, which transformers joins while it loads them, are one by one. What is copied
    into them is in the model. Of a tensor that lies on several processes the parts are pieces,
    unless it is one itself."""
    views = {name: x.detach() for name, x in tensors.items()}
    if not getattr(model, "_weight_conversions", None):
        return dict(views)
    shard_model = {
        name: torch.empty(x.shape, device="meta")
        for name, x in views.items()
        if isinstance(x, DTensor)
    }
    held = {x.untyped_storage()._cdata: views[name] for name, x in shard_model.items()}
    parts = revert_weight_conversion(
        model, {name: x.as_subclass(_View) for name, x in (views | shard_model).items()}
    )

    def part(x: Tensor) -> Tensor | ShardedView:
        if not x.is_meta:
            return x.as_subclass(Tensor)
        of = held.get(x.untyped_storage()._cdata)
        if of is None:  # of a model that is not read yet
            return x.as_subclass(Tensor)
        return (
            of if x.shape == of.shape else ShardedView(of, x.shape, x.stride(), x.storage_offset())
        )

    return {name: part(x) for name, x in parts.items()}


class _View(Tensor):
    """What transformers takes apart: it would copy some parts only to lay them out."""

    def contiguous(self, *_: Any, **__: Any) -> _View:
        return self


def to_numpy(x: Tensor) -> np.ndarray:
    """The array of a tensor; bfloat16 becomes ml_dtypes' type of that name."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(x: np.ndarray) -> Tensor:
    """The tensor of an array, without copying where it can be."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
