"""The images of a flat row, for the vision-language models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from areal_x.errors import ConfigError, UserError
from areal_x.hf.image_format import (
    ImageFormat,
    format_of,
    pixels_of,
    takes_images,
)
from areal_x.hf.image_positions import (
    TEXT_ONLY,
    Grid,
    batch_images,
    image_tokens,
    mrope_positions,
)
from areal_x.types import Batch
from areal_x_torch.flat_rows import FlatRow, to_tensor


class RowImages(NamedTuple):
    """The images of a flat row in the order of its tokens, and the indices of their tokens. spans: where
    the tokens begin and end of each image that sees itself whole. near: True if it does in layers with
    a window only."""

    patches: Float[Tensor, "patches features"]
    grids: Int[Tensor, "images 3"]
    places: Int[Tensor, " image_tokens"]
    spans: tuple[tuple[int, int], ...] = ()
    near: bool = False


def counts_in_three(config: Any) -> bool:
    """True if the model of a transformers config has positions in time, height and width."""
    return takes_images(config) and format_of(config).directed


def check_images(batch: Batch, config: Any, context: int = 1) -> None:
    """Raises: UserError for images that the model of a transformers config cannot read. context:
    processes that each row is split over."""
    if not batch.has_images:
        return
    if not takes_images(config):
        raise UserError(TEXT_ONLY)
    if context > 1:
        raise UserError(
            f"the batch has images, and torch does not split rows with images over mesh.context ="
            f" {context} processes yet: use mesh.fsdp"
        )
    patches, grids, image_segments = batch_images(batch)
    format_of(config).check(patches.shape[2], grids[image_segments > 0])


def check_sharing(shares: bool, directory: Path, config: Any) -> None:
    """Raises: ConfigError if prompts are to be shared by a vision-language model, or one whose
    attention is not told of it."""
    text = config.get_text_config()
    if shares and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        wanted = (
            f"False with {directory}, whose chunks of a sequence are not counted from a prompt on"
        )
        raise ConfigError("train.share_prompts", True, wanted)
    if shares and counts_in_three(config):
        wanted = f"False with {directory}, which has a vision tower, whose positions are counted differently"
        raise ConfigError("train.share_prompts", True, wanted)


def row_images(
    packed: Batch, flat: FlatRow, config: Any, device: torch.device, together: bool
) -> tuple[Int[np.ndarray, "*3 tokens"], RowImages | None]:
    """Returns positions of the tokens of a flat row, in time, height and width if the model has such
    positions, and its images, for a vision-language model.

    together: other processes gather the tower with this one if the batch has images at all. A
    process without images then encodes a small black one, of which nothing is used: its gradient of
    the tower is 0 instead of None.

    Raises: UserError if the image tokens of a sequence do not match its images.
    """
    form = format_of(config)
    token, merge = form.token, form.merge
    tokens, sampled = flat.take(packed.tokens), flat.take(packed.mask)
    of_image = image_tokens(tokens, token, sampled)
    positions = np.repeat(flat.positions[None], 3, axis=0) if form.directed else flat.positions
    stops = np.cumsum(flat.lengths)
    patches: list[np.ndarray] = []
    grids: list[Grid] = []
    spans: list[tuple[int, int]] = []
    for start, stop in () if flat.padding else zip(stops - flat.lengths, stops, strict=True):
        own = _images_of(packed, int(flat.places[start])) if packed.has_images else []
        if own or of_image[start:stop].any():
            here, own_grids = slice(start, stop), [grid for grid, _ in own]
            if form.directed:
                given = tokens[here], own_grids, token, merge, sampled[here]
                positions[:, here] = mrope_positions(*given)
            else:
                found = form.spans(tokens[here], own_grids, sampled[here])
                if form.whole:
                    spans += [(int(start) + first, int(start) + end) for first, end in found]
            patches += [of_image for _, of_image in own]
            grids += own_grids
    if not grids:
        if not together or not packed.has_images:
            return positions, None
        patches = [np.zeros((int(np.prod(form.blank)), form.features), np.float32)]
        grids = [form.blank]
        of_image[:] = False
    arrays = np.concatenate(patches), np.array(grids), np.flatnonzero(of_image)
    on_device = [to_tensor(x, device) for x in arrays]
    return positions, RowImages(*on_device)._replace(spans=tuple(spans), near=form.near)


def _images_of(packed: Batch, place: int) -> list[tuple[Grid, Float[np.ndarray, "_ features"]]]:
    """Returns grid and patches of each image of the sequence to which a token of the flattened
    packed rows belongs."""
    patches, grids, image_segments = batch_images(packed)
    row, column = divmod(place, packed.shape[1])
    ends = np.cumsum(grids[row].prod(axis=1))
    own = np.flatnonzero(image_segments[row] == packed.segment_ids[row, column])
    return [
        (tuple(grids[row, i].tolist()), patches[row, ends[i] - grids[row, i].prod() : ends[i]])
        for i in own
    ]


def embed_images(
    model: nn.Module, tokens: Int[Tensor, "1 tokens"], seen: RowImages | None
) -> dict[str, Any]:
    """Returns the inputs of a vision-language model's decoder.

    transformers' own forward would take every token with an image's id for an image; here one that
    the policy generated is text.
    """
    if seen is None:
        return {"input_ids": tokens}
    embedded: Float[Tensor, "1 tokens features"] = model.get_input_embeddings()(tokens)
    taken = len(seen.places)  # all of them, or none
    features, *deeper = (x[:taken] for x in features_of(model, seen.patches, seen.grids))
    given: dict[str, Any] = {
        "inputs_embeds": embedded.index_copy(1, seen.places, features[None].to(embedded.dtype))
    }
    if deeper:
        masks = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        masks[:, seen.places] = True
        given |= {"visual_pos_masks": masks, "deepstack_visual_embeds": deeper}
    return given | layer_inputs(model, tokens.index_fill(1, seen.places, pad_of(model)))


def layer_inputs(model: nn.Module, tokens: Int[Tensor, "rows tokens"]) -> dict[str, Any]:
    """Returns the inputs of a Gemma 4's layers that are looked up by token, if it has them. tokens: with
    `pad_of` in place of images."""
    language: Any = getattr(model, "language_model", None)
    if not getattr(language, "hidden_size_per_layer_input", 0):
        return {}
    return {"per_layer_inputs": language.get_per_layer_inputs(tokens, None)}


def pad_of(model: nn.Module) -> int:
    """Returns the token whose inputs of layers those of images are."""
    return model.config.get_text_config().pad_token_id or 0


def features_of(
    model: nn.Module, patches: Float[Tensor, "patches features"], grids: Int[Tensor, "images 3"]
) -> list[Float[Tensor, "image_tokens width"]]:
    """Returns the tower's features of images: the embeddings of their tokens and, for Qwen3-VL,
    what is added to the states after each of the first layers."""
    form: ImageFormat = format_of(model.config)
    if form.side:
        found = model.get_image_features(pixels_of(patches, form), return_dict=True)
        if model.config.model_type == "llama4":  # which projects them in its own forward pass
            return [model.multi_modal_projector(found.last_hidden_state.flatten(0, 1))]
        return [found.pooler_output.flatten(0, 1)]
    if form.colours_last:
        found = model.get_image_features(*padded_patches(patches, grids, form), return_dict=True)
        return [torch.cat(list(found.pooler_output))]
    if not form.directed:
        count = len(patches) // form.merge**2
        if count == 1:  # transformers drops the axis of a single token: with another it stays
            patches, grids = (torch.cat([x, x]) for x in (patches, grids))
        pixels, sizes = padded_pixels(patches, grids, form)
        found = model.get_image_features(pixels, image_sizes=sizes, return_dict=True)
        return [torch.cat(list(found.pooler_output))[:count]]
    found = model.get_image_features(patches, grids, return_dict=True)
    deeper = getattr(found, "deepstack_features", None) or ()
    return [torch.cat(list(x)) for x in (found.pooler_output, *deeper)]


def padded_pixels(
    patches: Float[Tensor, "patches features"], grids: Int[Tensor, "images 3"], form: ImageFormat
) -> tuple[Float[Tensor, "images channels height width"], list[list[int]]]:
    """Returns the pixels of images of several sizes, padded to the largest height and width, and
    their heights and widths."""
    each = grids.tolist()
    counts = [height * width for _, height, width in each]
    images = [
        pixels_of(x, form, grid)[0] for x, grid in zip(patches.split(counts), each, strict=True)
    ]
    sizes = [list(x.shape[1:]) for x in images]
    height, width = (max(size) for size in zip(*sizes, strict=True))
    padded = [
        nn.functional.pad(x, (0, width - own_width, 0, height - own_height))
        for x, (own_height, own_width) in zip(images, sizes, strict=True)
    ]
    return torch.stack(padded), sizes


def padded_patches(
    patches: Float[Tensor, "patches features"], grids: Int[Tensor, "images 3"], form: ImageFormat
) -> tuple[Float[Tensor, "images most features"], Int[Tensor, "images most 2"]]:
    """Returns the patches of each image, as many as the largest has, and the column and row of each; −1
    for padding."""
    each = grids.tolist()
    found = patches.split([height * width for _, height, width in each])
    places = []
    for _, height, width in each:
        at = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        squares = (height // form.merge, form.merge, width // form.merge, form.merge, 2)
        places.append(at.view(squares).transpose(1, 2).reshape(-1, 2).flip(1).to(patches.device))
    pad = nn.utils.rnn.pad_sequence
    return pad(list(found), True), pad(places, True, -1)
