"""The images of a flat row, for the vision-language models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from areal_x.errors import ConfigError, UserError
from areal_x.hf.image_positions import (
    TEXT_ONLY,
    Grid,
    batch_images,
    check_grids,
    image_tokens,
    mrope_positions,
)
from areal_x.types import Batch
from areal_x_torch.flat_rows import FlatRow, to_tensor

# The model_types whose positions `mrope_positions` computes.
VISION_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
# Those of multimodal models of which the language model alone is trained, on text.
TEXT_OF = ("gemma3", "gemma4", "gemma4_unified", "llama4", "mistral3")


class RowImages(NamedTuple):
    """The images of a flat row in the order of its tokens, and the indices of their tokens."""

    patches: Float[Tensor, "patches features"]
    grids: Int[Tensor, "images 3"]
    places: Int[Tensor, " image_tokens"]


def sees(config: Any) -> bool:
    """True if images are trained with the model of a transformers config."""
    return hasattr(config, "vision_config") and config.model_type in VISION_MODELS


def check_images(batch: Batch, config: Any) -> None:
    """Raises: UserError for images that the model of a transformers config cannot read."""
    if not batch.has_images:
        return
    if not sees(config):
        raise UserError(TEXT_ONLY)
    tower = config.vision_config
    channels = tower.in_chans if hasattr(tower, "in_chans") else tower.in_channels
    features = channels * tower.temporal_patch_size * tower.patch_size**2
    patches, grids, image_segments = batch_images(batch)
    if patches.shape[2] != features:
        wanted = f"the model's tower takes {features}: use the processor that it came with"
        raise UserError(
            f"the images of the batch have patches of {patches.shape[2]} numbers, but {wanted}"
        )
    check_grids(grids[image_segments > 0].tolist(), tower.spatial_merge_size)


def check_sharing(shares: bool, directory: Path, config: Any) -> None:
    """Raises: ConfigError if prompts are to be shared by a vision-language model, or one whose
    attention is not told of it."""
    text = config.get_text_config()
    if shares and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        wanted = (
            f"False with {directory}, whose chunks of a sequence are not counted from a prompt on"
        )
        raise ConfigError("train.share_prompts", True, wanted)
    if shares and sees(config):
        wanted = f"False with {directory}, which has a vision tower, whose positions are counted differently"
        raise ConfigError("train.share_prompts", True, wanted)


def row_images(
    packed: Batch, flat: FlatRow, config: Any, device: torch.device, together: bool
) -> tuple[Int[np.ndarray, "3 tokens"], RowImages | None]:
    """Returns positions in time, height and width of the tokens of a flat row, and its images, for
    a vision-language model.

    together: other processes gather the tower with this one if the batch has images at all. A
    process without images then encodes a small black one, of which nothing is used: its gradient of
    the tower is 0 instead of None.

    Raises: UserError if the image tokens of a sequence do not match its images.
    """
    merge, token = config.vision_config.spatial_merge_size, config.image_token_id
    tokens, sampled = flat.take(packed.tokens), flat.take(packed.mask)
    of_image = image_tokens(tokens, token, sampled)
    positions = np.repeat(flat.positions[None], 3, axis=0)
    stops = np.cumsum(flat.lengths)
    patches: list[np.ndarray] = []
    grids: list[Grid] = []
    for start, stop in () if flat.padding else zip(stops - flat.lengths, stops, strict=True):
        own = _images_of(packed, int(flat.places[start])) if packed.has_images else []
        if own or of_image[start:stop].any():
            here, own_grids = slice(start, stop), [grid for grid, _ in own]
            positions[:, here] = mrope_positions(
                tokens[here], own_grids, token, merge, sampled[here]
            )
            patches += [of_image for _, of_image in own]
            grids += own_grids
    if not grids:
        if not together or not packed.has_images:
            return positions, None
        patches, grids = (
            [np.zeros((merge**2, batch_images(packed)[0].shape[2]), np.float32)],
            [(1, merge, merge)],
        )
        of_image[:] = False
    arrays = np.concatenate(patches), np.array(grids), np.flatnonzero(of_image)
    return positions, RowImages(*(to_tensor(x, device) for x in arrays))


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
    model: nn.Module, embedded: Float[Tensor, "1 tokens features"], seen: RowImages | None
) -> dict[str, Any]:
    """Returns the inputs of a vision-language model's decoder in place of token ids.

    transformers' own forward would take every token with an image's id for an image; here one that
    the policy generated is text.
    """
    if seen is None:
        return {"inputs_embeds": embedded}
    taken = len(seen.places)  # all of them, or none
    features, *deeper = (x[:taken] for x in features_of(model, seen.patches, seen.grids))
    given: dict[str, Any] = {
        "inputs_embeds": embedded.index_copy(1, seen.places, features[None].to(embedded.dtype))
    }
    if deeper:
        masks = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        masks[:, seen.places] = True
        given |= {"visual_pos_masks": masks, "deepstack_visual_embeds": deeper}
    return given


def features_of(
    model: nn.Module, patches: Float[Tensor, "patches features"], grids: Int[Tensor, "images 3"]
) -> list[Float[Tensor, "image_tokens width"]]:
    """Returns the tower's features of images: the embeddings of their tokens and, for Qwen3-VL,
    what is added to the states after each of the first layers."""
    found = model.get_image_features(patches, grids, return_dict=True)
    deeper = getattr(found, "deepstack_features", None) or ()
    return [torch.cat(list(x)) for x in (found.pooler_output, *deeper)]
