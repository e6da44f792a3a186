"""The images of sequences that are sampled: where their tokens are in rows of unequal lengths, and
the tower's features of them.

A prefill goes through the rows in chunks of columns. The tower runs once, before the first chunk,
and encodes each image once, however many rows have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_x.errors import UserError
from areal_x.hf.image_format import format_of
from areal_x.hf.image_positions import Grid, image_tokens, mrope_positions
from areal_x.protocols.sampler import SlotRequest
from areal_x.types import Images
from areal_x_torch.flat_rows import to_tensor
from areal_x_torch.images import features_of, layer_inputs, pad_of

TEXT = -1  # index of tokens without a feature


@dataclass(frozen=True)
class PromptImages:
    """model: without its head. features: the tower's features of all images, see `features_of`. which:
    for each token its index in them; TEXT for others."""

    model: nn.Module
    features: Sequence[Float[Tensor, "image_tokens width"]]
    which: Int[Tensor, "rows length"]

    def inputs(self, tokens: Int[Tensor, "rows chunk"], start: int) -> dict[str, Any]:
        """Returns the inputs of the language model for a chunk of the first rows, from column `start`
        on."""
        which = self.which[: tokens.shape[0], start : start + tokens.shape[1]]
        seen = which != TEXT
        if not seen.any():
            return {"input_ids": tokens}
        embedded = self.model.get_input_embeddings()(tokens)
        first, *deeper = (x[which[seen]] for x in self.features)
        embedded[seen] = first.to(embedded.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embedded}
        inputs |= layer_inputs(self.model, tokens.masked_fill(seen, pad_of(self.model)))
        return inputs | (
            {"visual_pos_masks": seen, "deepstack_visual_embeds": deeper} if deeper else {}
        )


def encode_images(
    model: PreTrainedModel, requests: Sequence[SlotRequest], length: int
) -> PromptImages | None:
    """Encodes the images of these sequences, each a row of `length` tokens; None if there are none.

    model: a vision-language model in evaluation mode.
    """
    distinct: dict[int, Images] = {id(r.images): r.images for r in requests if r.images is not None}
    if not distinct:
        return None
    merge = format_of(model.config).merge
    sizes = {key: len(images.patches) // merge**2 for key, images in distinct.items()}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    which = np.full((len(requests), length), TEXT, np.int64)
    for row, request in zip(which, requests, strict=True):
        if request.images is not None:
            of_image = np.flatnonzero(
                image_tokens(request.tokens, model.config.image_token_id, generated(request))
            )
            row[of_image] = starts[id(request.images)] + np.arange(len(of_image))
    patches = np.concatenate([images.patches for images in distinct.values()])
    grids = np.concatenate([images.grids for images in distinct.values()])
    device = model.device
    return PromptImages(
        model.base_model,
        features_of(model.base_model, to_tensor(patches, device), to_tensor(grids, device)),
        to_tensor(which, device),
    )


def places_of(
    model: PreTrainedModel, request: SlotRequest
) -> tuple[Int[np.ndarray, "3 length"], list[tuple[int, int]]]:
    """Returns the position of each token of a sequence in time, height and width, for a model with one
    position per token the same three times; and where the tokens of each image begin and end that see
    those after them, of which a model with causal attention has none.

    Raises: UserError if its image tokens do not match its images, or nothing follows the last of
    them.
    """
    form = format_of(model.config)
    if request.generated == 0 and request.tokens[-1] == form.token:
        raise UserError(
            "a prompt ends in an image: text must follow it, as chat templates write it"
        )
    grids: list[Grid] = (
        [] if request.images is None else [tuple(grid) for grid in request.images.grids.tolist()]
    )
    if form.directed:
        given = request.tokens, grids, form.token, form.merge, generated(request)
        return mrope_positions(*given), []
    spans = form.spans(request.tokens, grids, generated(request))
    positions = np.repeat(np.arange(len(request.tokens))[None], 3, axis=0)
    return positions, spans if form.whole else []


def generated(request: SlotRequest) -> Bool[np.ndarray, " length"]:
    """Returns which tokens the policy generated: they are text, whatever their ids."""
    length = len(request.tokens)
    return np.arange(length) >= length - request.generated
