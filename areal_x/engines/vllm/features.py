"""Sends the images of a prompt to a vLLM server beside its tokens, as patches, so that the sampling
policy and the trained one see the same numbers.

The field `features` of /inference/v1/generate (vLLM 0.32) has, for each image, a name, its position
among the tokens, and its arrays in msgpack, each as type, shape and bytes. Each array also declares
how the arrays of several images are batched. The server's own image processor is not used: its tokens
and patches are those of areal_x.hf.image_reader, which are trained on.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.installed import is_cpu_build
from areal_x.engines.vllm.plugin import BACKEND, RDT
from areal_x.engines.vllm.transports import TRANSPORTS
from areal_x.errors import UserError
from areal_x.hf.image_format import (
    SEEN,
    VISION_MODELS,
    ImageFormat,
    described_config,
    format_of,
    patch_places,
    pixels_of,
)
from areal_x.hf.image_positions import Grid, count_patches
from areal_x.hf.model_dir import read_config
from areal_x.types import Images

# By default a server normalises pixels (mean and standard deviation) itself; patches are already
# normalised.
NORMALISED = "--no-mm-device-do-normalize"
RAW = 3  # vLLM's number for bytes in msgpack
KEPT = 4  # prompts whose packed images are kept: a group's requests come one after another


def served_format(model: Path) -> ImageFormat:
    """Returns how a served model takes images. Raises: UserError for a text-only model."""
    config = read_config(model)
    if config.get("model_type") not in VISION_MODELS or not config.get("vision_config"):
        raise UserError(
            f"the prompt has images but {model} is a text-only model: train a vision-language model"
        )
    return format_of(described_config(config))


# transformers interleaves the angles of time, height and width in these whatever config.json says; vLLM
# where it says so, and is 0.2 nats a token away otherwise.
INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def check_sent_images(model: Path, config: VLLMConfig) -> None:
    """Raises: UserError for a model whose images cannot be sent to vLLM servers, or that they would
    compute otherwise.

    On a CPU vLLM's attention is causal within images too: with small random models of Gemma 4's form a
    token's log-probability is up to 0.8 nats away. Tokens of text between the rows of an image's keep
    their embeddings by areal_x.engines.vllm.image_rows, which a server has with areal-x beside it.
    """
    read = read_config(model)
    kind = read.get("model_type")
    instead = "use train.engine = 'embedded'"
    text = read.get("text_config") or {}
    rotation = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if kind in INTERLEAVED and not rotation.get("mrope_interleaved"):
        raise UserError(
            f"the prompt has images and {model} is a {kind} whose config.json does not say"
            " that its rotations are interleaved, which vLLM then leaves out: set mrope_interleaved ="
            f" true in its text_config.rope_parameters, as on the hub, or {instead}"
        )
    if kind not in SEEN:
        return
    form = format_of(described_config(read))
    if form.rows and config.urls and TRANSPORTS[config.transport] not in (BACKEND, RDT):
        raise UserError(
            f"the prompt has images and {model} has tokens of text between the rows of an image's"
            " tokens, which servers of vllm.urls take with areal-x installed beside them alone: set"
            f" vllm.transport = 'files', which needs it too, or {instead}"
        )
    if form.whole and not config.urls and is_cpu_build():
        near = " in layers with a window" if form.near else ""
        raise UserError(
            f"the prompt has images and {model} lets the tokens of an image see each other{near}, which"
            f" vLLM's attention on a CPU does not: {instead}, or servers on GPUs"
        )


@dataclass(frozen=True)
class PackedImages:
    """Images as a request has them, each by its name."""

    names: list[str]

    content: list[str]


class Packer:
    """Packs the images of a served model for requests, those of a group's attempts once."""

    def __init__(self, form: ImageFormat) -> None:
        self.form = form
        self._packed: OrderedDict[int, tuple[Images, PackedImages]] = OrderedDict()  # by id

    def features(
        self, prompt: Int32[np.ndarray, " prompt"], images: Images
    ) -> dict[str, dict[str, list[Any]]]:
        """Returns `features_of` a request."""
        if id(images) not in self._packed:
            self._packed[id(images)] = images, packed_images(images, self.form)
        self._packed.move_to_end(id(images))
        while len(self._packed) > KEPT:
            self._packed.popitem(last=False)
        return features_of(prompt, images, self.form, self._packed[id(images)][1])


def packed_images(images: Images, form: ImageFormat) -> PackedImages:
    """Packs images. Raises: UserError without msgpack."""
    names, content, patch = [], [], 0
    for grid in images.grids.tolist():
        count = count_patches([grid])
        patches = images.patches[patch : patch + count]
        patch += count
        names.append(hashlib.sha256(np.array(grid).tobytes() + patches.tobytes()).hexdigest())
        content.append(_packed(_arrays(patches, tuple(grid), form)))
    return PackedImages(names, content)


def features_of(
    prompt: Int32[np.ndarray, " prompt"],
    images: Images,
    form: ImageFormat,
    packed: PackedImages | None = None,
) -> dict[str, dict[str, list[Any]]]:
    """Returns the field `features` of a request. prompt: the prompt alone, without sampled tokens. packed:
    the images, if they are packed already.

    An image's position is all from its first token to its last. Tokens of text between its rows keep
    their own embeddings by areal_x.engines.vllm.image_rows.

    Raises: UserError if its image tokens do not match its images.
    """
    grids = [(int(t), int(h), int(w)) for t, h, w in images.grids]
    try:
        spans = form.spans(prompt, grids)
    except UserError as error:
        raise UserError(f"the prompt belongs to other images: {error}") from error
    packed = packed or packed_images(images, form)
    places = []
    row = 0
    for grid in grids:
        rows = grid[1] // form.merge if form.rows else 1
        first, stop = spans[row][0], spans[row + rows - 1][1]
        row += rows
        places.append({"offset": first, "length": stop - first})
    return {
        "mm_hashes": {"image": packed.names},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": packed.content},
    }


# An array, and how those of several images are batched: one after another (flat), or each as a row.
Arrays = dict[str, tuple[np.ndarray, str]]
FLAT, BATCHED = "flat", "batched"


def _arrays(patches: np.ndarray, grid: Grid, form: ImageFormat) -> Arrays:
    """Returns the arrays of one image as its model's processor in vLLM makes them."""
    if form.side:
        pixels = (pixels_of(patches, form), FLAT)
        if form.whole:  # Gemma 3: an image, and how many it was cut into
            return {"pixel_values": pixels, "num_patches": (np.array(1), BATCHED)}
        # Llama 4: each tile is an image of one tile, as the tower does not see the others.
        one_tile = {"patches_per_image": np.array(1), "aspect_ratios": np.array([1, 1])}
        return {"pixel_values": pixels, **{name: (x, BATCHED) for name, x in one_tile.items()}}
    if form.rows:
        return {"pixel_values": (pixels_of(patches, form, grid)[0], BATCHED)}
    if form.colours_last:
        places = (patch_places(grid, form), BATCHED)
        return {"pixel_values": (patches, BATCHED), "pixel_position_ids": places}
    return {"pixel_values": (patches, FLAT), "image_grid_thw": (np.array(grid), BATCHED)}


def _packed(arrays: Arrays) -> str:
    """Packs the arrays of one image. Raises: UserError without msgpack."""
    try:
        import msgpack
    except ImportError as error:
        raise UserError(
            "sending images to vLLM servers needs msgpack, which is not installed: pip install"
            " msgpack"
        ) from error

    def packed(x: np.ndarray, batching: str) -> dict[str, Any]:
        counts = x.dtype.kind == "i"
        x = x.astype(np.int64) if counts else np.ascontiguousarray(x)
        data = [x.dtype.name, list(x.shape), msgpack.ExtType(RAW, x.tobytes())]
        how: dict[str, Any] = {"keep_on_cpu": counts and x.ndim < 2}
        if batching == FLAT:
            how |= {"slices": [[0, len(x), None]], "dim": 0}
        return {"data": data, "field": [batching, how]}

    each = {name: packed(x, batching) for name, (x, batching) in arrays.items()}
    return base64.b64encode(msgpack.packb(each)).decode()
