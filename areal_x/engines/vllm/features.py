"""The images of a prompt as a vLLM server takes them beside its tokens: patches as they are, so
that the policy that is asked and the one that is trained see the same numbers.

What /inference/v1/generate calls `features` (vLLM 0.32): of each image a name, its place among the
tokens, and its arrays in msgpack, each as the type, the shape and the bytes. How arrays of several
images lie together in a batch is said beside each.
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

# By default a server subtracts the mean and divides by the deviation of pixels itself: it must take
# patches as they are.
NORMALISED = "--no-mm-device-do-normalize"
RAW = 3  # vLLM's number for bytes in msgpack


def features_for(
    model: Path, prompt: Int32[np.ndarray, " prompt"], images: Images
) -> dict[str, Any]:
    """See `features_of`. model: the directory of the model that is served. Raises: UserError for
    one that reads text alone."""
    config = read_config(model)
    if "image_token_id" not in config:
        raise UserError(
            f"the prompt has images and {model} reads text alone: train a model that sees"
        )
    return features_of(
        prompt, images, config["image_token_id"], config["vision_config"]["spatial_merge_size"]
    )


def features_of(
    prompt: Int32[np.ndarray, " prompt"], images: Images, image_token_id: int, merge: int
) -> dict[str, dict[str, list[Any]]]:
    """The field `features` of a request. prompt: its tokens without any that the policy has drawn
    since.

    Raises: UserError where its image tokens are not those of its images.
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
                f"the image at token {first} needs {length} image tokens in a row: the prompt is of"
                " other images"
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
    """The arrays of one image: its patches are neighbours of the next one's, its grid is a row of
    the grids of all.

    Raises: UserError without msgpack.
    """
    try:
        import msgpack
    except ImportError as error:
        raise UserError(
            "images go to vLLM servers in msgpack, which is not installed: pip install msgpack"
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
