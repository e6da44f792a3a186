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

from areal_x.errors import UserError
from areal_x.hf.image_positions import count_patches
from areal_x.hf.model_dir import read_config
from areal_x.types import Images

# By default a server normalises pixels (mean and standard deviation) itself; patches are already
# normalised.
NORMALISED = "--no-mm-device-do-normalize"
RAW = 3  # vLLM's number for bytes in msgpack


def features_for(
    model: Path, prompt: Int32[np.ndarray, " prompt"], images: Images
) -> dict[str, Any]:
    """Returns `features_of` for a model. model: the directory of the served model. Raises:
    UserError for a text-only model."""
    config = read_config(model)
    if "image_token_id" not in config:
        raise UserError(
            f"the prompt has images but {model} is a text-only model: train a vision-language model"
        )
    return features_of(
        prompt, images, config["image_token_id"], config["vision_config"]["spatial_merge_size"]
    )


def features_of(
    prompt: Int32[np.ndarray, " prompt"], images: Images, image_token_id: int, merge: int
) -> dict[str, dict[str, list[Any]]]:
    """Returns the field `features` of a request. prompt: the prompt alone, without sampled tokens.

    Raises: UserError if its image tokens do not match its images.
    """
    names, places, content = [], [], []
    start = patch = 0
    for grid in images.grids:
        count = count_patches([grid.tolist()])
        found = np.flatnonzero(prompt[start:] == image_token_id)
        first, length = start + (int(found[0]) if len(found) else 0), count // merge**2
        start = first + length
        if (
            not len(found)
            or not (prompt[first:start] == image_token_id).all()
            or start > len(prompt)
        ):
            raise UserError(
                f"the image at token {first} needs {length} consecutive image tokens: the prompt"
                " belongs to other images"
            )
        patches = images.patches[patch : patch + count]
        patch += count
        names.append(hashlib.sha256(grid.tobytes() + patches.tobytes()).hexdigest())
        places.append({"offset": first, "length": length})
        content.append(_packed(patches, grid))
    return {
        "mm_hashes": {"image": names},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": content},
    }


def _packed(patches: np.ndarray, grid: np.ndarray) -> str:
    """Packs the arrays of one image: its patches are concatenated with the next image's, its grid
    is one row of all images' grids.

    Raises: UserError without msgpack.
    """
    try:
        import msgpack
    except ImportError as error:
        raise UserError(
            "sending images to vLLM servers needs msgpack, which is not installed: pip install"
            " msgpack"
        ) from error

    def array(x: np.ndarray) -> list[Any]:
        return [x.dtype.name, list(x.shape), msgpack.ExtType(RAW, x.tobytes())]

    flat = ["flat", {"slices": [[0, len(patches), None]], "dim": 0, "keep_on_cpu": False}]
    each = {
        "pixel_values": {"data": array(np.ascontiguousarray(patches)), "field": flat},
        "image_grid_thw": {
            "data": array(grid.astype(np.int64)),
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return base64.b64encode(msgpack.packb(each)).decode()
