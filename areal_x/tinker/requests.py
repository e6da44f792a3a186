"""The bodies that the API's clients send as JSON (for datums: areal_x/tinker/datums.py). Unknown
fields are ignored, as later clients send more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_x.errors import UserError
from areal_x.tinker.data import MOST_TARGETS

MOST_ELEMENTS = 1 << 24  # of one array, whatever its shape claims
NAMES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
OUTSIDE = "token ids are integers from 0 to 2³¹ - 1"


class Body(msgspec.Struct, kw_only=True):
    """A JSON body."""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class InSession(Body):
    session_id: str


class Lora(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Kind(Body):
    type: str = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Kind = msgspec.field(default_factory=Kind)


class OfModel(Body):
    model_id: str


class Adam(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    type: str = "adamw"


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: Adam | None = None
    optimizer_params: Kind | None = None


class SaveWeights(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveExternal(Body):
    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Body):
    sampling_session_id: str


class Sampling(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    chunks: list[Chunk]


class Tensor(Body):
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body):
    prompt: ModelInput
    sampling_params: Sampling
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


class Retrieve(Body):
    request_id: str


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    ttl_seconds: int | None = None


class OfPath(Body):
    tinker_path: str


class Ttl(Body):
    ttl_seconds: int | None = None


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes) -> B:
    """Raises: UserError naming what is wrong with the body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the body is not a {kind.__name__} request: {error}") from error


# ---- arrays


def tokens_of(prompt: ModelInput) -> np.ndarray:
    """Returns the tokens of a prompt in JSON. Raises: UserError for images and audio."""
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"this server reads tokens, and the input has a chunk {chunk.type!r}")
    ids = [x for chunk in prompt.chunks for x in chunk.tokens]
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:  # numpy refuses longer integers
        raise UserError(OUTSIDE)
    return np.array(ids, np.int32)


def as_tokens(ids: np.ndarray) -> np.ndarray:
    """Raises: UserError for what is no token id."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise UserError(OUTSIDE)
    return ids.astype(np.int32)


def dense(
    values: np.ndarray,
    shape: Sequence[int],
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> np.ndarray:
    """Returns an array of this shape; rows, columns: those of a sparse one (CSR), 0 elsewhere.

    Raises: UserError unless they fit together.
    """
    if any(side < 0 for side in shape) or math.prod(shape) > MOST_ELEMENTS:
        raise UserError(f"an array has the shape {list(shape)}")
    if rows is None or columns is None:
        if math.prod(shape) != values.size:
            raise UserError(f"an array of {values.size} elements has the shape {list(shape)}")
        return values.reshape(shape)
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and rows[0] == 0
    fits = fits and (np.diff(rows) >= 0).all() and rows[-1] == len(columns) == values.size
    if not fits or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise UserError(f"a sparse array's indices do not fit the shape {list(shape)}")
    found = np.zeros(shape, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found


def json_tensor(tensor: Tensor, absent: int = 0) -> np.ndarray:
    """Returns an array, with `absent` where a sparse one has nothing. Raises: UserError."""
    if tensor.dtype not in NAMES:
        raise UserError(f"an array is of float32 or int64, not {tensor.dtype!r}")
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinite then is refused as such
        values = np.array(tensor.data).astype(NAMES[tensor.dtype])
    shape = [values.size] if tensor.shape is None else tensor.shape
    if tensor.sparse_crow_indices is None:
        return dense(values, shape)
    rows, columns = (
        np.array(x or [], np.int64) for x in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    )
    return dense(values - absent, shape, rows, columns) + absent


def cells_of(tensor: Tensor, prompt: int) -> np.ndarray:
    """Returns the ids of target_prompt_logprobs, -1 where nothing is asked. prompt: its tokens.

    Raises: UserError.
    """
    ids = json_tensor(tensor, absent=-1)
    if ids.dtype.kind != "i" or ids.ndim != 2 or len(ids) != prompt - 1 or not ids.size:
        raise UserError(
            "target_prompt_logprobs are integers in a row for each token of the prompt but the"
            f" first, {prompt - 1} rows"
        )
    if ids.shape[1] > MOST_TARGETS or ids.max() < 0:
        raise UserError(f"target_prompt_logprobs name from 1 to {MOST_TARGETS} ids a row")
    return np.where(ids < 0, -1, as_tokens(np.maximum(ids, 0)))
