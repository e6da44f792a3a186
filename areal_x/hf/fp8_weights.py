"""Weights in block-scaled fp8, in Hugging Face's form (DeepSeek-V3's), for servers.

    NAME.weight             [out, in]    e4m3
    NAME.weight_scale_inv   [out / 128, in / 128]    fp32, what each block of 128 × 128 is multiplied with

The matrices of decoder layers are stored so, and all else as it is; config.json has a
`quantization_config` that names what is not (`modules_to_not_convert`). A scale is the power of two with
which the largest number of its block is at most 448: the numbers are those of `trainer.precision =
'fp8'` (areal_x_torch.fp8, areal_x_jax.fp8), to the bit, of weights in the precision that is published.
Source: arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.hf.weight_copy import Tensors

BLOCK = 128
LARGEST = 448.0
LEAST = 2.0**-100  # a block of smaller numbers has the scale of this one
SCALES = "_scale_inv"
# Matrices of layers that stay as they are, by the last parts of their modules' names: routers, the few
# columns of gates and of a delta rule's steps.
EXACT = (
    *(".gate", ".router", ".router.proj", ".shared_expert_gate"),
    *(".in_proj_ba", ".in_proj_b", ".in_proj_a"),
)
IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|multi_modal_projector|embed_vision|embed_audio)\."
)
# Matrices that servers join with others above them in one, whose blocks must not straddle two.
JOINED = ("q_proj", "k_proj", "gate_proj", "q_a_proj")
BY_COLUMNS = ("o_proj", "down_proj")  # divided by their inputs among accelerators


def is_kernel(name: str, shape: tuple[int, ...]) -> bool:
    """True if a tensor of this name in a model's files is stored in fp8."""
    module, _, kind = name.rpartition(".")
    inside = IN_LAYER.search(name) is not None and TOWERS.search(name) is None
    return kind == "weight" and len(shape) == 2 and inside and not f".{module}".endswith(EXACT)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], tensor: int = 1) -> None:
    """tensor: accelerators among which a server divides each matrix.

    Raises: UserError for a model whose matrices servers cannot take in blocks.
    """
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        if ".experts" in name and len(shape) == 3 and IN_LAYER.search(name):
            raise UserError(f"{name} holds all experts of a layer, of which fp8 has no form here")
        if not is_kernel(name, shape):
            continue
        part = module.rpartition(".")[2]
        rows, columns = shape
        if part in JOINED or (tensor > 1 and part not in BY_COLUMNS):
            _check_blocks(name, "rows", rows, tensor)
        elif tensor > 1:
            _check_blocks(name, "columns", columns, tensor)


def _check_blocks(name: str, what: str, count: int, tensor: int) -> None:
    if count % (BLOCK * tensor):
        parts = f" in {tensor} parts" if tensor > 1 else ""
        raise UserError(f"the {count} {what} of {name} are no whole blocks of {BLOCK}{parts}")


def config_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the config of a model in this form. shapes: of its tensors, by name."""
    plain = (name for name, shape in shapes.items() if not is_kernel(name, shape))
    matrices = {name.removesuffix(".weight") for name in plain if name.endswith(".weight")}
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(
            {"lm_head"} | {name for name in matrices if len(shapes[f"{name}.weight"]) == 2}
        ),
    }
    return {**config, "quantization_config": quantization}


def write_model(directory: Path, source: Path) -> None:
    """Writes the model of a directory in this form. Raises: UserError like `check_shapes`."""
    shapes = model_dir.shapes(source)
    check_shapes(shapes)
    model_dir.write_model(directory, source, quantised(model_dir.read_tensors(source)))
    config = config_of(model_dir.read_config(source), shapes)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def quantised(tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors in this form: after each that is stored in fp8, its scales."""
    with ThreadPoolExecutor() as pool:
        for name, tensor in tensors:
            if not is_kernel(name, tensor.shape):
                yield name, tensor
                continue
            rounded, scales = round_blocks(tensor, pool)
            yield name, rounded
            yield f"{name}{SCALES}", scales


def round_blocks(
    weight: Float[np.ndarray, "out in"], pool: ThreadPoolExecutor | None = None
) -> tuple[Float[np.ndarray, "out in"], Float32[np.ndarray, "rows columns"]]:
    """Returns the numbers of a weight in e4m3, and the scale of each block; those at the ends are
    smaller where they must be. pool: threads that take rows of blocks."""
    import ml_dtypes

    rounded = np.empty(weight.shape, np.uint8)
    scales = np.empty([-(-n // BLOCK) for n in weight.shape], np.float32)

    def strip(number: int) -> None:
        rows = slice(number * BLOCK, (number + 1) * BLOCK)
        scales[number] = _round_strip(weight[rows], rounded[rows])

    for _ in (pool.map if pool else map)(strip, range(len(scales))):
        pass  # raises what a thread did
    return rounded.view(ml_dtypes.float8_e4m3fn), scales


def _round_strip(
    weight: Float[np.ndarray, "rows in"], into: UInt8[np.ndarray, "rows in"]
) -> Float32[np.ndarray, " columns"]:
    """Writes the e4m3 numbers of one row of blocks, and returns their scales."""
    import ml_dtypes

    x = weight.astype(np.float32)
    starts = np.arange(0, x.shape[1], BLOCK)
    largest = np.maximum.reduceat(np.abs(x).max(axis=0), starts)
    exponents = (
        (np.maximum(largest, np.float32(LEAST)) / np.float32(LARGEST)).view(np.int32) + 0x7FFFFF
    ) >> 23
    scales, inverse = (
        e.astype(np.int32).view(np.float32) for e in (exponents << 23, (254 - exponents) << 23)
    )
    x *= np.repeat(inverse, BLOCK)[: x.shape[1]]
    if weight.dtype == ml_dtypes.bfloat16:  # a power of two leaves the low half of its bits 0
        np.take(_of_bfloat16(), x.view(np.uint32) >> 16, out=into, mode="clip")
    else:
        into[:] = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return scales


@cache
def _of_bfloat16() -> UInt8[np.ndarray, " 65536"]:
    """Returns e4m3 by the bits of bfloat16: four times as fast as ml_dtypes' conversion."""
    import ml_dtypes

    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        return every.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
