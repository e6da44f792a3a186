"""The tokens that stand for images in a prompt, in place of the one that a chat template writes for
each, as Hugging Face's processors write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int32

from areal_x.errors import UserError
from areal_x.hf.image_format import ImageFormat
from areal_x.hf.image_tiles import TiledImages
from areal_x.types import Images

# After each row of a Mistral's image, and after the last (PixtralProcessor).
ROW_ENDS = ("[IMG_BREAK]", "[IMG_END]")
# Around the tiles of a Llama 4's image, between those of a row, after a row, and before the whole image,
# which the template writes (Llama4Processor).
TILE_MARKS = (
    *("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "<|image|>",
)


def placeholder(form: ImageFormat, images: Images, vocabulary: Mapping[str, int]) -> int:
    """Returns the token that a template writes for each image."""
    return _ids(TILE_MARKS, vocabulary)[-1] if isinstance(images, TiledImages) else form.token


def tokens_of_each(
    form: ImageFormat,
    images: Images,
    vocabulary: Mapping[str, int],
    ends: tuple[int, int] | None = None,
) -> list[Int32[np.ndarray, " tokens"]]:
    """Returns the tokens of each image. ends: those between which an image's stand.

    Raises: UserError for a vocabulary without the tokens that stand between an image's.
    """
    counts = images.grids.prod(axis=1) // form.merge**2
    if isinstance(images, TiledImages):
        ids = _ids(TILE_MARKS, vocabulary)
        return [_of_tiles(layout, [form.token] * counts[0], ids) for layout in images.layouts]
    found = [np.full(count, form.token, np.int32) for count in counts]
    if form.rows:
        row_end, last = _ids(ROW_ENDS, vocabulary)
        for i, (_, _, width) in enumerate(images.grids.tolist()):
            rows = found[i].reshape(-1, width // form.merge)
            found[i] = np.pad(rows, ((0, 0), (0, 1)), constant_values=row_end).reshape(-1)
            found[i][-1] = last
    if ends is not None:
        found = [np.array([ends[0], *own, ends[1]], np.int32) for own in found]
    return found


def _of_tiles(
    layout: tuple[int, int], tile: Sequence[int], ids: Sequence[int]
) -> Int32[np.ndarray, " tokens"]:
    begin, end, beside, below, whole = ids
    rows, columns = layout
    row = [x for _ in range(columns) for x in (*tile, beside)]
    several = [*row[:-1], below] * rows if rows * columns > 1 else []
    return np.array([begin, *several, whole, *tile, end], np.int32)


def _ids(names: Sequence[str], vocabulary: Mapping[str, int]) -> list[int]:
    if missing := [name for name in names if name not in vocabulary]:
        raise UserError(
            f"the model's tokenizer has no token {missing[0]}, which stands between the tokens of an"
            " image: use the tokenizer that came with the model"
        )
    return [vocabulary[name] for name in names]


def expanded(
    tokens: Int32[np.ndarray, " T"],
    places: Int[np.ndarray, " images"],
    shown: Sequence[Int32[np.ndarray, " tokens"]],
) -> Int32[np.ndarray, " prompt"]:
    """Replaces the tokens at these places by those of images."""
    first, *others = np.split(tokens, places)
    parts = [first, *(x for n, rest in zip(shown, others, strict=True) for x in (n, rest[1:]))]
    return np.concatenate(parts).astype(np.int32)
