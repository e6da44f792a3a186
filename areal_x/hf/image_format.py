"""How a vision-language model takes images: as patches, of which squares share a token.

    Qwen       images of any size; positions in three directions (`image_positions.mrope_positions`)
    Gemma 3    images of one size, whose tokens see each other
    Mistral 3  images of any size; a token of text ends each row of an image's tokens
    Gemma 4    images of any size; tokens of an image see each other in layers with a window, or not
    Llama 4    tiles of one size, several of which are an image: here each is an image of its own

Positions are counted as for text and attention is causal where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int

from areal_x.errors import UserError
from areal_x.hf.image_positions import Grid, check_count, check_grids, image_spans

# Model types that are trained with images: those with positions in three directions, and others.
DIRECTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
SEEN = ("gemma3", "mistral3", "gemma4", "gemma4_unified", "llama4")
VISION_MODELS = (*DIRECTED, *SEEN)


@dataclass(frozen=True)
class ImageFormat:
    """How a model takes images."""

    token: int
    """Id of the tokens that an image's embeddings replace."""

    merge: int
    """Side of the squares of patches that share a token."""

    patch: tuple[int, ...]
    """Size of a patch: (channels, [frames,] height, width), or (height, width, channels)."""

    side: int = 0
    """Patches along each side of every image; 0 if images differ in size."""

    directed: bool = False
    """True if positions are counted in time, height and width."""

    whole: bool = False
    """True if the tokens of an image see each other, those after them too."""

    near: bool = False
    """True if they do in layers with a window only."""

    rows: bool = False
    """True if a token of text follows each row of an image's tokens."""

    colours_last: bool = False
    """True if a patch is (height, width, channels)."""

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

    def spans(
        self,
        tokens: Int[np.ndarray, " length"],
        grids: Sequence[Grid],
        sampled: Bool[np.ndarray, " length"] | None = None,
    ) -> list[tuple[int, int]]:
        """Returns where the tokens begin and where they end of each image of a sequence, or of each
        row of one where text stands between rows. See `image_positions.image_spans`.

        Raises: UserError if the tokens do not match the images.
        """
        runs = grids
        if self.rows:
            check_count(tokens, grids, self.token, self.merge, sampled)
            runs = [
                (1, self.merge, width)
                for _, height, width in grids
                for _ in range(height // self.merge)
            ]
        apart = self.whole or self.rows
        return image_spans(tokens, runs, self.token, self.merge, sampled, apart)


def format_of(config: Any) -> ImageFormat:
    """Reads the format of a vision-language model from transformers' config object.

    Raises: UserError for images of one size that do not divide into patches, or those into squares.
    """
    tower, token = config.vision_config, config.image_token_id
    if config.model_type == "mistral3":
        patch = tower.num_channels, tower.patch_size, tower.patch_size
        return ImageFormat(token, config.spatial_merge_size, patch, rows=True)
    if config.model_type == "llama4":
        if not (merge := shuffled_side(config)):
            raise UserError(
                "config.json: the parts of vision_config do not fit together (image_size, patch_size,"
                " pixel_shuffle_ratio, intermediate_size, and the widths of projectors), so that the"
                " model is trained on text alone"
            )
        patch = tower.num_channels, tower.patch_size, tower.patch_size
        return ImageFormat(token, merge, patch, tower.image_size // tower.patch_size)
    if config.model_type.startswith("gemma4"):
        size, merge = tower.patch_size, tower.pooling_kernel_size
        if config.model_type == "gemma4_unified":
            size, merge = size * merge, 1  # without a tower: its patches are of a whole token
        whole = config.text_config.use_bidirectional_attention == "vision"
        patch = size, size, 3
        return ImageFormat(token, merge, patch, whole=whole, near=True, colours_last=True)
    if config.model_type != "gemma3":
        channels = tower.in_chans if hasattr(tower, "in_chans") else tower.in_channels
        size = tower.patch_size
        of_frames = channels, tower.temporal_patch_size, size, size
        return ImageFormat(token, tower.spatial_merge_size, of_frames, directed=True)
    if not divides(config):
        raise UserError(
            f"config.json: images of image_size = {tower.image_size} in patches of patch_size ="
            f" {tower.patch_size} do not become mm_tokens_per_image = {config.mm_tokens_per_image}"
            " tokens: the patches must fill the image, and equal squares of them make a square of tokens"
        )
    side = tower.image_size // tower.patch_size
    merge = side // isqrt(config.mm_tokens_per_image)
    patch = tower.num_channels, tower.patch_size, tower.patch_size
    return ImageFormat(token, merge, patch, side, whole=True)


def takes_images(config: Any) -> bool:
    """True if a model of transformers' config object is trained with images, where a backend has its
    tower: of others the language model alone is, on text."""
    if getattr(config, "vision_config", None) is None:
        return False
    if config.model_type == "gemma3":
        return divides(config)
    if config.model_type == "llama4":
        return shuffled_side(config) > 0
    return config.model_type in VISION_MODELS


def divides(config: Any) -> bool:
    """True if the patches of a model's images of one size fill the image, and equal squares of them make
    a square of tokens. The language model of others reads text."""
    tower, tokens = config.vision_config, config.mm_tokens_per_image
    side, rest = divmod(tower.image_size, tower.patch_size)
    return tokens > 0 and isqrt(tokens) ** 2 == tokens and not rest and side % isqrt(tokens) == 0


def shuffled_side(config: Any) -> int:
    """Returns the side of the squares of a Llama 4's patches that share a token; 0 if its patches do not
    fill a tile, squares of them do not, or its projectors do not read what comes before them: then
    transformers' tower cannot run either."""
    tower = config.vision_config
    size, patch, merge = tower.image_size, tower.patch_size, round(1 / tower.pixel_shuffle_ratio)
    if not (isinstance(size, int) and isinstance(patch, int)) or size % (patch * merge):
        return 0
    widths = {tower.projector_input_dim, tower.projector_output_dim, tower.vision_output_dim}
    joined = tower.intermediate_size == tower.hidden_size * merge**2
    return merge if merge * tower.pixel_shuffle_ratio == 1 and joined and len(widths) == 1 else 0


def described_config(config: Mapping[str, Any]) -> Any:
    """Returns transformers' config object, with its defaults, of a config.json that it can read."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[str(config["model_type"])].from_dict(deepcopy(dict(config)))


def patches_of(
    pixels: Float32[np.ndarray, "images channels height width"], form: ImageFormat
) -> tuple[Float32[np.ndarray, "patches features"], Int[np.ndarray, "images 3"]]:
    """Cuts images of one size into patches, those that share a token one after another; returns them
    and the images' grids. Raises: UserError for images of a size that the tower does not take."""
    images, merge, (channels, *size) = len(pixels), form.merge, form.patch
    rows, columns = (n // own for n, own in zip(pixels.shape[2:], size, strict=True))
    if form.side:
        rows = columns = form.side
    wanted = channels, rows * size[0], columns * size[1]
    if pixels.shape[1:] != wanted:
        raise UserError(
            f"the model's processor makes images of {pixels.shape[1:]}, but its tower takes {wanted}:"
            " correct size in preprocessor_config.json"
        )
    check_grids([(1, rows, columns)], merge)
    cut = pixels.reshape(
        images, channels, rows // merge, merge, size[0], columns // merge, merge, size[1]
    )
    patches = cut.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, form.features)
    return patches, np.tile(np.array([1, rows, columns], np.int32), (images, 1))


def pixels_of(patches: Any, form: ImageFormat, grid: Sequence[int] = ()) -> Any:
    """The inverse of `patches_of`, for arrays of numpy or tensors of torch: the pixels [images,
    channels, height, width] of patches. grid: of each image; needed if images differ in size."""
    merge, (channels, *size) = form.merge, form.patch
    _, rows, columns = grid or form.blank
    cut = patches.reshape(-1, rows // merge, columns // merge, merge, merge, channels, *size)
    # torch has no transpose of all axes, numpy no permute.
    moved = np.transpose if isinstance(patches, np.ndarray) else type(patches).permute
    joined = moved(cut, (0, 5, 1, 3, 6, 2, 4, 7))
    return joined.reshape(-1, channels, rows * size[0], columns * size[1])


def patch_places(grid: Grid, form: ImageFormat) -> Int[np.ndarray, "patches 2"]:
    """Returns the column and row of each patch of an image, in the order of `Images.patches`."""
    _, rows, columns = grid
    merge = form.merge
    squares = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    return squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)[:, ::-1]


def placed_patches(
    patches: Float32[np.ndarray, "patches features"],
    places: Int[np.ndarray, "patches 2"],
    form: ImageFormat,
    joined: int = 1,
) -> tuple[Float32[np.ndarray, "patches features"], Int[np.ndarray, "1 3"]]:
    """Orders the patches of an image, row by row, so that those that share a token follow each other;
    returns them and the image's grid. places: column and row of each patch, −1 for padding. joined:
    side of the squares of patches that are one of the model's."""
    columns, rows = places.max(axis=0) + 1
    side = joined if joined > 1 else form.merge
    check_grids([(1, int(rows), int(columns))], side)
    cut = patches[: rows * columns].reshape(rows // side, side, columns // side, side, -1)
    squares = cut.swapaxes(1, 2)
    if joined > 1:
        size = form.patch[0] // joined
        pixels = squares.reshape(-1, joined, joined, size, size, form.patch[2])
        squares, rows, columns = pixels.swapaxes(2, 3), rows // joined, columns // joined
    grid = np.array([[1, rows, columns]], np.int32)
    return np.ascontiguousarray(squares.reshape(-1, form.features), np.float32), grid
