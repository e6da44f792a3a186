"""Images among the tokens of a sequence, and the positions that the tokens then have, for the
vision-language models of every backend.

An image is given by its grid: (frames, height, width) in patches, as in Hugging Face's processors
(image_grid_thw).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from areal_x.errors import UserError
from areal_x.types import Batch

Grid = tuple[int, int, int]
TEXT_ONLY = (
    "the batch has images and the model reads text only: train a vision-language model, Qwen2.5-VL,"
    " Qwen3-VL, Gemma 3 and 4 or Mistral Small 3.1"
)


def mrope_positions(
    tokens: Int[np.ndarray, " length"],
    grids: Sequence[Grid],
    image_token_id: int,
    merge: int,
    sampled: Bool[np.ndarray, " length"] | None = None,
) -> Int[np.ndarray, "3 length"]:
    """Positions in time, height and width (M-RoPE) of one sequence whose images, in order, have
    these grids.

    Text counts up in all three. An image begins where the text before it ends, and the text after
    it continues after the larger of its two sides; so a token that follows text has the position of
    the one before it plus 1.

    merge: side of the squares of patches that share a token. sampled: tokens sampled from the
    policy, which are text even if one has the image token's id.

    Not supported: Qwen2.5-VL's videos, whose frames are spaced by their seconds. In Qwen3-VL's, text
    separates the frames, so each would be one more grid of a single frame, but with the id of video
    tokens.

    Raises: UserError if the tokens do not match the images.
    """
    tokens = np.asarray(tokens)
    positions = np.empty((3, len(tokens)), np.int32)
    start = position = 0
    spans = image_spans(tokens, grids, image_token_id, merge, sampled)
    for (first, stop), (frames, height, width) in zip(spans, grids, strict=True):
        positions[:, start:first] = position + np.arange(first - start)
        position += first - start
        inside = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        positions[:, first:stop] = position + inside
        position += max(height, width) // merge
        start = stop
    positions[:, start:] = position + np.arange(len(tokens) - start)
    return positions


def image_spans(
    tokens: Int[np.ndarray, " length"],
    grids: Sequence[Grid],
    image_token_id: int,
    merge: int,
    sampled: Bool[np.ndarray, " length"] | None = None,
    apart: bool = False,
) -> list[tuple[int, int]]:
    """Returns for each image of a sequence, in order, where its tokens begin and where they end. See
    `mrope_positions`. apart: refuses images without text between them, of which the tokens could not
    tell where one ends.

    Raises: UserError if the tokens do not match the images.
    """
    is_image = check_count(tokens, grids, image_token_id, merge, sampled)
    spans: list[tuple[int, int]] = []
    start = 0
    for grid in grids:
        first = start + int(is_image[start:].argmax())
        count = count_patches([grid]) // merge**2
        if not is_image[first : first + count].all():
            raise UserError(
                f"the image at token {first} is interrupted: it needs {count} image tokens in a row"
            )
        if apart and spans and first == start:
            raise UserError(
                f"the image at token {first} follows another at once: text must stand between them, as"
                " chat templates write it"
            )
        start = first + count
        spans.append((first, start))
    return spans


def check_count(
    tokens: Int[np.ndarray, " length"],
    grids: Sequence[Grid],
    image_token_id: int,
    merge: int,
    sampled: Bool[np.ndarray, " length"] | None = None,
) -> Bool[np.ndarray, " length"]:
    """Returns `image_tokens` of a sequence. Raises: UserError if they are not as many as its images
    need."""
    is_image = image_tokens(tokens, image_token_id, sampled)
    wanted = count_patches(grids) // merge**2
    if is_image.sum() != wanted:
        raise UserError(
            f"a sequence has {is_image.sum()} image tokens, but its {len(grids)} images need"
            f" {wanted}"
        )
    return is_image


def image_tokens(
    tokens: Int[np.ndarray, ...], image_token_id: int, sampled: Bool[np.ndarray, ...] | None
) -> Bool[np.ndarray, ...]:
    """Mask of the tokens that stand for images: those with the image token's id that were not
    sampled from the policy."""
    found = tokens == image_token_id
    return found if sampled is None else found & ~np.asarray(sampled, bool)


def count_patches(grids: Sequence[Grid]) -> int:
    return sum(frames * height * width for frames, height, width in grids)


def check_grids(grids: Sequence[Grid], merge: int) -> None:
    """Raises: UserError for images that do not divide into squares of merge × merge patches."""
    for _, height, width in grids:
        if height % merge or width % merge:
            raise UserError(
                f"an image of {height}×{width} patches: its height and width must be multiples of"
                f" {merge}"
            )


def batch_images(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns patches, grids and image_segments of a batch with images."""
    patches, grids, image_segments = batch.patches, batch.grids, batch.image_segments
    assert patches is not None
    assert grids is not None
    assert image_segments is not None
    return patches, grids, image_segments
