"""Cuts images into tiles of one size with Pillow, as Llama 4's image processor does with torchvision.

An image is scaled, without distortion, into the canvas of at most `max_patches` tiles that leaves most
of its size, and padded; one of several tiles is followed by the whole image as one more tile.
Source: transformers' Llama4ImageProcessor, whose arithmetic this repeats but for the interpolation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from areal_x.types import Images

FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class TiledImages(Images):
    """Images of which each tile has a grid of its own."""

    layouts: tuple[tuple[int, int], ...] = ()
    """Rows and columns of tiles of each image, without the one of the whole image that follows several."""


def joined(parts: Sequence[Images]) -> Images:
    """Returns the images of several, in their order; those of one as they are."""
    if len(parts) == 1:
        return parts[0]
    patches = np.concatenate([part.patches for part in parts])
    grids = np.concatenate([part.grids for part in parts])
    tiled = [part for part in parts if isinstance(part, TiledImages)]
    if not tiled:
        return Images(patches, grids)
    return TiledImages(patches, grids, tuple(x for part in tiled for x in part.layouts))


@dataclass(frozen=True)
class TileProcessor:
    """Settings of Llama 4's image processor, with transformers' defaults."""

    size: dict[str, int] = field(default_factory=lambda: {"height": 336, "width": 336})
    max_patches: int = 16
    resize_to_max_canvas: bool = False
    resample: int = 2
    rescale_factor: float = 1 / 255
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, Any]:
        """Returns the tiles of all images as `pixel_values`, and as `aspect_ratios` the rows and columns
        of tiles of each. images: of Pillow, in RGB."""
        tiles, layouts = zip(*map(self.tiles_of, images), strict=True)
        return {"pixel_values": np.concatenate(tiles), "aspect_ratios": layouts}

    def tiles_of(
        self, image: Any
    ) -> tuple[Float32[np.ndarray, "tiles 3 side side"], tuple[int, int]]:
        """Returns the tiles of one image, and how many rows and columns of them there are."""
        side, own = self.size["height"], (image.height, image.width)
        rows, columns = self._layout(own)
        canvas = rows * side, columns * side
        room = canvas
        if not self.resize_to_max_canvas:  # small images are enlarged to one tile only
            room = min(max(own[0], side), canvas[0]), min(max(own[1], side), canvas[1])
        pixels = np.zeros((3, *canvas), np.uint8)
        height, width = _fitted(own, room)
        pixels[:, :height, :width] = self._resized(image, height, width)
        cut = pixels.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        tiles = cut.reshape(-1, 3, side, side)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self._resized(image, side, side)[None]])
        return self._normalized(tiles), (rows, columns)

    def _layout(self, own: tuple[int, int]) -> tuple[int, int]:
        """Returns rows and columns of tiles of the canvas for an image of this height and width."""
        shapes = np.array(_shapes(self.max_patches), np.int64)
        # As torch computes them, as equal ones are compared.
        high, wide = (
            (shapes * self.size["height"])[:, i].astype(np.float32) / np.float32(own[i])
            for i in (0, 1)
        )
        scales = np.minimum(high, wide)
        best = scales.max()
        if best >= 1 and not self.resize_to_max_canvas:
            best = scales[scales >= 1].min()
        chosen = shapes[scales == best]
        rows, columns = chosen[chosen.prod(axis=1).argmin()].tolist()
        return rows, columns

    def _resized(self, image: Any, height: int, width: int) -> np.ndarray:
        resized = image.resize((width, height), self.resample)
        return np.asarray(resized).transpose(2, 0, 1)

    def _normalized(self, tiles: np.ndarray) -> Float32[np.ndarray, "tiles 3 side side"]:
        """Scales pixels, in bfloat16 as the original."""
        mean, std = (
            _bfloat16(np.array(x, np.float32))[:, None, None]
            for x in (self.image_mean, self.image_std)
        )
        scaled = _bfloat16(tiles.astype(np.float32) * np.float32(self.rescale_factor))
        return _bfloat16(_bfloat16(scaled - mean) / std)


def load_tile_processor(directory: str) -> TileProcessor:
    """Reads a model's settings. Raises: OSError; ValueError for settings that make no tiles."""
    read = json.loads((Path(directory) / FILE).read_text(encoding="utf-8"))
    known = {name: read[name] for name in TileProcessor.__dataclass_fields__ if name in read}
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not read.get(name, True):
            raise ValueError(f"{name} is false in {FILE}")
    return TileProcessor(**known)


def _shapes(most: int) -> list[tuple[int, int]]:
    """Returns the rows and columns of all canvases of at most so many tiles, those of one ratio together,
    in the order in which transformers prefers them."""
    of_ratio = defaultdict(list)
    for count in range(most, 0, -1):
        for rows in (n for n in range(1, count + 1) if count % n == 0):
            of_ratio[rows / (count // rows)].append((rows, count // rows))
    return [shape for shapes in of_ratio.values() for shape in shapes]


def _fitted(own: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """Returns the largest height and width of an image's ratio in a room."""
    high, wide = room[0] / own[0], room[1] / own[1]
    if wide < high:
        return max(min(floor(own[0] * wide), room[0]), 1), max(room[1], 1)
    return max(room[0], 1), max(min(floor(own[1] * high), room[1]), 1)


def _bfloat16(x: Float32[np.ndarray, ...]) -> Float32[np.ndarray, ...]:
    """Rounds finite numbers to the nearest of bfloat16, to even ones of two."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
