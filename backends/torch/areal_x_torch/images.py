"""The images of a flat row, for transformers' own models that see."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from areal_x.errors import ConfigError, UserError
from areal_x.hf.image_positions import TEXT_ONLY, check_grids, image_tokens, mrope_positions
from areal_x.types import Batch
from areal_x_torch.flat_rows import Flat, to_tensor

SEEING = ("qwen2_5_vl", "qwen3_vl")  # the model_types whose positions `mrope_positions` gives


class Seen(NamedTuple):
    """The images of a flat row in the order of its tokens, and the tokens that stand for them."""

    patches: Float[Tensor, "patches features"]
    grids: Int[Tensor, "images 3"]
    places: Int[Tensor, " image_tokens"]


def check_images(batch: Batch, config: Any) -> None:
    """Raises: UserError for images that the model of a transformers config does not see, or not in
    this form."""
    if not batch.has_images:
        return
    tower = getattr(config, "vision_config", None)
    if tower is None:
        raise UserError(TEXT_ONLY)
    channels = tower.in_chans if hasattr(tower, "in_chans") else tower.in_channels
    features = channels * tower.temporal_patch_size * tower.patch_size**2
    if batch.patches.shape[2] != features:
        wanted = f"the model's tower takes {features}: use the processor that it came with"
        raise UserError(
            f"the images of the batch have patches of {batch.patches.shape[2]} numbers, but"
            f" {wanted}"
        )
    check_grids(batch.grids[batch.image_segments > 0].tolist(), tower.spatial_merge_size)


def check_sharing(shares: bool, directory: Path, config: Any) -> None:
    """Raises: ConfigError where prompts are to be shared by a model that sees."""
    if shares and hasattr(config, "vision_config"):
        wanted = f"False with {directory}, which sees images, whose positions are counted otherwise"
        raise ConfigError("train.share_prompts", True, wanted)


def seen_of(
    packed: Batch, flat: Flat, config: Any, device: torch.device, together: bool
) -> tuple[Int[np.ndarray, "3 tokens"], Seen | None]:
    """Positions in time, height and width of the tokens of a flat row, and its images, for a model
    that sees.

    together: with other processes, which gather the tower if the batch has images at all. Then one
    without any looks at a small black one, of which nothing is taken: its gradient of the tower is
    0, and not None. Raises: UserError where the image tokens of a sequence are not those of its
    images.
    """
    merge, token = config.vision_config.spatial_merge_size, config.image_token_id
    tokens, sampled = flat.take(packed.tokens), flat.take(packed.mask)
    of_image = image_tokens(tokens, token, sampled)
    positions = np.repeat(flat.positions[None], 3, axis=0)
    stops = np.cumsum(flat.lengths)
    patches, grids = [], []
    for start, stop in () if flat.silent else zip(stops - flat.lengths, stops, strict=True):
        own = _images_of(packed, int(flat.places[start]))
        if len(own) or of_image[start:stop].any():
            row = int(flat.places[start]) // packed.shape[1]
            theirs = [tuple(packed.grids[row, i].tolist()) for i in own]
            here = slice(start, stop)
            positions[:, here] = mrope_positions(tokens[here], theirs, token, merge, sampled[here])
            ends = np.cumsum(packed.grids[row].prod(axis=1)) if len(own) else ()
            patches += [
                packed.patches[row, ends[i] - int(np.prod(packed.grids[row, i])) : ends[i]]
                for i in own
            ]
            grids += theirs
    if not grids:
        if not together or not packed.has_images:
            return positions, None
        patches, grids = (
            [np.zeros((merge**2, packed.patches.shape[2]), np.float32)],
            [(1, merge, merge)],
        )
        of_image[:] = False
    arrays = np.concatenate(patches), np.array(grids), np.flatnonzero(of_image)
    return positions, Seen(*(to_tensor(x, device) for x in arrays))


def _images_of(packed: Batch, place: int) -> Int[np.ndarray, " images"]:
    """Which images of its row belong to the sequence that a token of the flattened packed rows is
    of."""
    if not packed.has_images:
        return np.zeros(0, np.int64)
    row, column = divmod(place, packed.shape[1])
    return np.flatnonzero(packed.image_segments[row] == packed.segment_ids[row, column])


def look(
    model: nn.Module, embedded: Float[Tensor, "1 tokens features"], seen: Seen | None
) -> dict[str, Any]:
    """What the language model of a transformers model that sees is given in place of tokens.

    transformers' own forward would take every token with an image's id for an image's; here one
    that the policy wrote is text.
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
    """What the tower of a transformers model says of images: what stands in place of their tokens'
    embeddings, and of Qwen3-VL what is added to the states behind each of the first layers."""
    found = model.get_image_features(patches, grids, return_dict=True)
    deeper = getattr(found, "deepstack_features", None) or ()
    return [torch.cat(list(x)) for x in (found.pooler_output, *deeper)]
