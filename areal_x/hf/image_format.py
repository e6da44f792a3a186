"""How a vision-language model takes images: as patches, of which squares share a token.

Two kinds of families. Qwen's take images of any size, each a grid of patches, and count positions in
three directions (`image_positions.mrope_positions`). Gemma 3's take images of one size, count
positions as for text, and let the tokens of an image see those after them, up to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from areal_x.errors import UserError
from areal_x.hf.image_positions import Grid, check_grids

SQUARE = ("gemma3",)  # model types with images of one size


@dataclass(frozen=True)
class ImageFormat:
    """How a model takes images."""

    token: int
    """Id of the tokens that an image's embeddings replace."""

    merge: int
    """Side of the squares of patches that share a token."""

    patch: tuple[int, ...]
    """Size of a patch: (channels, [frames,] height, width)."""

    side: int = 0
    """Patches along each side of every image; 0 if images differ in size. Then positions are counted
    in three directions, and attention is causal within an image too."""

    @property
    def features(self) -> int:
        """Numbers in a patch."""
        return int(np.prod(self.patch))

    @property
    def blank(self) -> Grid:
        """The grid of the smallest image."""
        side = self.side or self.merge
        return 1, side, side

    def check(self, features: int, grids: Int[np.ndarray, "images 3"]) -> None:
        """Raises: UserError for images whose patches have another number of features, or with grids
        that the tower does not take."""
        if features != self.features:
            wanted = f"the model's tower takes {self.features}: use the processor that it came with"
            raise UserError(
                f"the images of the batch have patches of {features} numbers, but {wanted}"
            )
        check_grids(grids.tolist(), self.merge)
        for _, height, width in grids[np.any(grids != self.blank, axis=1)] if self.side else ():
            raise UserError(
                f"an image of {height}×{width} patches: the model's tower takes"
                f" {self.side}×{self.side}: use the processor that it came with"
            )


def format_of(config: Any) -> ImageFormat:
    """Reads the format of a vision-language model from transformers' config object.

    Raises: UserError for images of one size that do not divide into patches, or those into squares.
    """
    tower = config.vision_config
    if config.model_type not in SQUARE:
        channels = tower.in_chans if hasattr(tower, "in_chans") else tower.in_channels
        size = tower.patch_size
        of_frames = channels, tower.temporal_patch_size, size, size
        return ImageFormat(config.image_token_id, tower.spatial_merge_size, of_frames)
    if not divides(config):
        raise UserError(
            f"config.json: images of image_size = {tower.image_size} in patches of patch_size ="
            f" {tower.patch_size} do not become mm_tokens_per_image = {config.mm_tokens_per_image}"
            " tokens: the patches must fill the image, and equal squares of them make a square of tokens"
        )
    side = tower.image_size // tower.patch_size
    merge = side // isqrt(config.mm_tokens_per_image)
    patch = tower.num_channels, tower.patch_size, tower.patch_size
    return ImageFormat(config.image_token_id, merge, patch, side)


def divides(config: Any) -> bool:
    """True if the patches of a model's images of one size fill the image, and equal squares of them make
    a square of tokens. The language model of others reads text."""
    tower, tokens = config.vision_config, config.mm_tokens_per_image
    side, rest = divmod(tower.image_size, tower.patch_size)
    return tokens > 0 and isqrt(tokens) ** 2 == tokens and not rest and side % isqrt(tokens) == 0


def described_config(config: Mapping[str, Any]) -> Any:
    """Returns transformers' config object, with its defaults, of a config.json that it can read."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[str(config["model_type"])].from_dict(deepcopy(dict(config)))


def patches_of(
    pixels: Float32[np.ndarray, "images channels height width"], form: ImageFormat
) -> tuple[Float32[np.ndarray, "patches features"], Int[np.ndarray, "images 3"]]:
    """Cuts images of one size into patches, those that share a token one after another; returns them
    and the images' grids. Raises: UserError for images of another size."""
    images, merge, (channels, *size) = len(pixels), form.merge, form.patch
    side, squares = form.side, form.side // form.merge
    wanted = channels, *(side * n for n in size)
    if pixels.shape[1:] != wanted:
        raise UserError(
            f"the model's processor makes images of {pixels.shape[1:]}, but its tower takes {wanted}:"
            " correct size in preprocessor_config.json"
        )
    cut = pixels.reshape(images, channels, squares, merge, size[0], squares, merge, size[1])
    patches = cut.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, form.features)
    return patches, np.tile(np.array(form.blank, np.int32), (images, 1))


def pixels_of(patches: Any, form: ImageFormat) -> Any:
    """The inverse of `patches_of`, for arrays of numpy or tensors of torch: the pixels [images,
    channels, height, width] of patches."""
    merge, (channels, *size) = form.merge, form.patch
    side, squares = form.side, form.side // form.merge
    cut = patches.reshape(-1, squares, squares, merge, merge, channels, *size)
    # torch has no transpose of all axes, numpy no permute.
    moved = np.transpose if isinstance(patches, np.ndarray) else type(patches).permute
    joined = moved(cut, (0, 5, 1, 3, 6, 2, 4, 7))
    return joined.reshape(-1, channels, *(side * n for n in size))
