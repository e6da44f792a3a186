"""Where the images of a sequence lie among its tokens, and the positions that those then have: what
every backend's models that see need to be told.

An image is given by its grid: (frames, height, width) in patches, as Hugging Face's processors say
it (image_grid_thw).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from areal_x.errors import UserError

Grid = tuple[int, int, int]
TEXT_ALONE = (
    "the batch has images and the model reads text alone: train one that sees, Qwen2.5-VL or"
    " Qwen3-VL"
)


def mrope_positions(
    tokens: Int[np.ndarray, " length"],
    grids: Sequence[Grid],
    image_token_id: int,
    merge: int,
    sampled: Bool[np.ndarray, " length"] | None = None,
) -> Int[np.ndarray, "3 length"]:
    """Positions in time, height and width of one sequence whose images, in order, have these grids.

    Text counts up in all three. An image begins where the text before it ends, and the text after
    it goes on after the larger of its two sides; so a token that follows text has the position of
    the one before it plus 1. sampled: the tokens that the policy wrote. They are text even if one
    has the image's id: no image stands behind it.

    Not covered: Qwen2.5-VL's videos, whose frames are spaced by their seconds. Qwen3-VL has text
    between the frames of a video, so each is one more grid of a single frame, but under the id of
    video tokens. Raises: UserError where the tokens are not those of these images.
    """
    tokens = np.asarray(tokens)
    of_image = image_tokens(tokens, image_token_id, sampled)
    wanted = count_patches(grids) // merge**2
    if of_image.sum() != wanted:
        raise UserError(
            f"a sequence has {of_image.sum()} image tokens, but its {len(grids)} images are"
            f" {wanted} of them"
        )
    positions = np.empty((3, len(tokens)), np.int32)
    start = position = 0
    for frames, height, width in grids:
        first = start + int(of_image[start:].argmax())
        positions[:, start:first] = position + np.arange(first - start)
        position += first - start
        inside = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        start = first + inside.shape[1]
        if not of_image[first:start].all():
            raise UserError(
                f"the image at token {first} is interrupted: it needs {inside.shape[1]} image"
                " tokens in a row"
            )
        positions[:, first:start] = position + inside
        position += max(height, width) // merge
    positions[:, start:] = position + np.arange(len(tokens) - start)
    return positions


def image_tokens(
    tokens: Int[np.ndarray, ...], image_token_id: int, sampled: Bool[np.ndarray, ...] | None
) -> Bool[np.ndarray, ...]:
    found = tokens == image_token_id
    return found if sampled is None else found & ~np.asarray(sampled, bool)


def count_patches(grids: Sequence[Grid]) -> int:
    return sum(frames * height * width for frames, height, width in grids)


def check_grids(grids: Sequence[Grid], merge: int) -> None:
    """Raises: UserError for images that do not divide into the merger's squares of merge²
    patches."""
    for _, height, width in grids:
        if height % merge or width % merge:
            raise UserError(
                f"an image of {height}×{width} patches: its height and width must be multiples of"
                f" {merge}"
            )
