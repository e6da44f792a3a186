"""Sends the images of a prompt to a vLLM server beside its tokens, as patches, so that the sampling
policy and the trained one see the same numbers.

The field `features` of /inference/v1/generate (vLLM 0.32) has, for each image, a name, its position
among the tokens, and its arrays in msgpack, each as type, shape and bytes. Each array also declares
how the arrays of several images are batched.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.installed import is_cpu_build
from areal_x.errors import UserError
from areal_x.hf.image_format import (
    SEEN,
    VISION_MODELS,
    ImageFormat,
    described_config,
    format_of,
    pixels_of,
)
from areal_x.hf.image_positions import count_patches
from areal_x.hf.model_dir import read_config
from areal_x.types import Images

# By default a server normalises pixels (mean and standard deviation) itself; patches are already
# normalised.
NORMALISED = "--no-mm-device-do-normalize"
RAW = 3  # vLLM's number for bytes in msgpack


def served_format(model: Path) -> ImageFormat:
    """Returns how a served model takes images. Raises: UserError for a text-only model."""
    config = read_config(model)
    if config.get("model_type") not in VISION_MODELS or not config.get("vision_config"):
        raise UserError(
            f"the prompt has images but {model} is a text-only model: train a vision-language model"
        )
    return format_of(described_config(config))


def check_sent_images(model: Path, config: VLLMConfig) -> None:
    """Raises: UserError for a model whose images cannot be sent to vLLM servers, or that they would
    compute otherwise.

    A request gives an image's place as one run of tokens, all of which its embeddings replace. On a CPU
    vLLM's attention is causal within images too.
    """
    read = read_config(model)
    if read.get("model_type") not in SEEN:
        return
    form = format_of(described_config(read))
    instead = "use train.engine = 'embedded' with train.backend = 'torch'"
    if form.rows:
        raise UserError(
            f"the prompt has images and {model} has tokens of text between the rows of an image's"
            f" tokens, which requests to vLLM servers cannot say: {instead}"
        )
    if form.colours_last or read["model_type"] == "llama4":
        raise UserError(
            f"the prompt has images and {model} is a {read['model_type']}, whose images are not sent to"
            f" vLLM servers: {instead}"
        )
    if form.whole and not config.urls and is_cpu_build():
        raise UserError(
            f"the prompt has images and {model} lets the tokens of an image see each other, which"
            f" vLLM's attention on a CPU does not: {instead}, or servers on GPUs"
        )


def features_of(
    prompt: Int32[np.ndarray, " prompt"], images: Images, form: ImageFormat
) -> dict[str, dict[str, list[Any]]]:
    """Returns the field `features` of a request. prompt: the prompt alone, without sampled tokens.

    Raises: UserError if its image tokens do not match its images.
    """
    names, places, content = [], [], []
    start = patch = 0
    for grid in images.grids:
        count = count_patches([grid.tolist()])
        found = np.flatnonzero(prompt[start:] == form.token)
        first, length = start + (int(found[0]) if len(found) else 0), count // form.merge**2
        start = first + length
        if not len(found) or not (prompt[first:start] == form.token).all() or start > len(prompt):
            raise UserError(
                f"the image at token {first} needs {length} consecutive image tokens: the prompt"
                " belongs to other images"
            )
        patches = images.patches[patch : patch + count]
        patch += count
        names.append(hashlib.sha256(grid.tobytes() + patches.tobytes()).hexdigest())
        places.append({"offset": first, "length": length})
        content.append(_packed(_arrays(patches, grid, form)))
    return {
        "mm_hashes": {"image": names},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": content},
    }


# How the arrays of several images are batched: one after another, or each as a row.
Arrays = dict[str, tuple[np.ndarray, bool]]


def _arrays(patches: np.ndarray, grid: np.ndarray, form: ImageFormat) -> Arrays:
    """Returns the arrays of one image as its model's processor in vLLM makes them, and which of them are
    concatenated with those of other images."""
    if form.side:  # an image, and how many it was cut into
        return {
            "pixel_values": (pixels_of(patches, form), True),
            "num_patches": (np.array(1), False),
        }
    return {"pixel_values": (patches, True), "image_grid_thw": (grid, False)}


def _packed(arrays: Arrays) -> str:
    """Packs the arrays of one image. Raises: UserError without msgpack."""
    try:
        import msgpack
    except ImportError as error:
        raise UserError(
            "sending images to vLLM servers needs msgpack, which is not installed: pip install"
            " msgpack"
        ) from error

    def packed(x: np.ndarray, joined: bool) -> dict[str, Any]:
        x = np.ascontiguousarray(x) if joined else x.astype(np.int64)
        data = [x.dtype.name, list(x.shape), msgpack.ExtType(RAW, x.tobytes())]
        slices = {"slices": [[0, len(x), None]], "dim": 0, "keep_on_cpu": False} if joined else {}
        kind = ["flat", slices] if joined else ["batched", {"keep_on_cpu": True}]
        return {"data": data, "field": kind}

    each = {name: packed(x, joined) for name, (x, joined) in arrays.items()}
    return base64.b64encode(msgpack.packb(each)).decode()
