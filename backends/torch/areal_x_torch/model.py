"""What is computed with a causal language model or a sequence classifier of transformers, and its
tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from areal_x.hf.image_format import takes_images
from areal_x_torch.dtensors import ShardedView
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import Routing, routing_scope
from areal_x_torch.images import RowImages, embed_images
from areal_x_torch.segments import Segments

SCORE = "score.weight"  # a sequence classifier's head
# Suffixes of the names of adapters beside a frozen model's own tensors.
ADAPTER = ".lora_A.weight", ".lora_B.weight"


class PackedRow(NamedTuple):
    """Sequences one after another, each with positions from 0 on; for a vision-language model three
    per token, and perhaps images. routing: what a mixture's routers do."""

    tokens: Int[Tensor, " tokens"]
    positions: Int[Tensor, "*3 tokens"]
    segments: Segments
    seen: RowImages | None = None
    routing: Routing | None = None


class Head(NamedTuple):
    """The layer that turns the last hidden states into logits, or into one score.

    softcap: logits are softcap · tanh(product / softcap); 0 turns it off. others: the processes
    that have the rest of the vocabulary, in the order of its words; None if it is all here.
    """

    weight: Float[Tensor, "vocabulary features"]
    bias: Float[Tensor, " vocabulary"] | None
    softcap: float = 0.0
    others: ProcessGroup | None = None

    def logits(self, hidden: Float[Tensor, "*_ features"]) -> Float[Tensor, "*_ vocabulary"]:
        """Returns logits in the dtype of `hidden`; the weights may have another."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return softcapped(
            nn.functional.linear(hidden, self.weight.to(hidden.dtype), bias), self.softcap
        )


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Float[Tensor, "tokens features"]:
    """Returns the head's input for each token of a flat row."""
    return head_input(model, decoder_states(model, row))


def decoder_states(model: PreTrainedModel, row: PackedRow) -> Float[Tensor, "tokens features"]:
    """Returns what the decoder gives for each token of a flat row."""
    read = {"input_ids": row.tokens[None]}
    if takes_images(model.config):
        read = embed_images(model.base_model, row.tokens[None], row.seen)
    # One row of positions, or of positions in three directions.
    with routing_scope(row.routing):
        states = decoder(model)(
            **read, position_ids=row.positions.unsqueeze(-2), use_cache=False, segments=row.segments
        )
    found: Tensor = states.last_hidden_state[0]
    return found


def head_input(
    model: PreTrainedModel, states: Float[Tensor, "*_ features"]
) -> Float[Tensor, "*_ features"]:
    """Scales the decoder's last hidden states as transformers scales the logits after the head."""
    scale = logit_scale_of(model)
    return states if scale == 1 else states * scale


def decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the language model; for a vision-language model, the part after the tower."""
    whole = has_vision(model) or model.base_model is model  # Llama 4's is
    found: nn.Module = inner_decoder(model) if whole else model.base_model
    return found


def head_layer(model: PreTrainedModel) -> nn.Module:
    layer: nn.Module = model.score if is_classifier(model) else model.get_output_embeddings()
    return layer


def head(model: PreTrainedModel) -> Head:
    layer = head_layer(model)
    return Head(layer.weight, layer.bias, softcap_of(model))


def softcap_of(model: PreTrainedModel) -> float:
    """Returns the soft cap of a language model's logits, 0 for none."""
    found = (
        None
        if is_classifier(model)
        else getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    )
    return float(found or 0.0)


def logit_scale_of(model: PreTrainedModel) -> float:
    """Returns the factor of a language model's logits: Cohere's, or 1 over Granite's."""
    if is_classifier(model):
        return 1.0
    text = model.config.get_text_config()
    scale, divisor = (getattr(text, name, None) for name in ("logit_scale", "logits_scaling"))
    return float(scale or 1) / float(divisor or 1)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Returns the number of tokens in the vocabulary."""
    return int(model.config.get_text_config().vocab_size)


def has_vision(model: PreTrainedModel) -> bool:
    """True for a multimodal model, whether or not it is trained with images (`images.sees`)."""
    return hasattr(model.config, "vision_config")


def is_classifier(model: PreTrainedModel) -> bool:
    return hasattr(model, "score")


def state_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors of a model's state under its own names, without copying: a tied head
    once, under the embedding's name."""
    buffers = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    named = [
        *model.named_parameters(),
        *((name, model.get_buffer(name)) for name in sorted(buffers)),
    ]
    return {name: x.detach() for name, x in named}


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor | ShardedView]:
    """Returns the same under the names that `save_pretrained` would write."""
    return as_saved(model, state_tensors(model))


def as_saved(
    model: PreTrainedModel, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor | ShardedView]:
    """Returns tensors shaped like the model's of these names, under the names of its files, as
    views: a mixture's experts, which transformers joins while it loads them, one by one. Writing
    into the views writes into the model. Parts of a sharded tensor are `ShardedView`s, unless a
    part is the whole tensor."""
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
        if of is None:  # the model is not loaded yet
            return x.as_subclass(Tensor)
        return (
            of if x.shape == of.shape else ShardedView(of, x.shape, x.stride(), x.storage_offset())
        )

    return {name: part(x) for name, x in parts.items()}


class _View(Tensor):
    """A tensor that transformers can take apart without copying parts to make them contiguous."""

    def contiguous(self, *_: Any, **__: Any) -> _View:
        return self


def to_numpy(x: Tensor) -> np.ndarray:
    """Returns the array of a tensor; bfloat16 becomes ml_dtypes' type of that name."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(x: np.ndarray) -> Tensor:
    """Returns the tensor of an array, without copying if possible."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
