"""The bodies that the API's clients send: JSON, and for datums also protocol buffers.

Unknown fields are ignored, as later clients send more. Field numbers are those of the client's
tinker_public.proto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_x.errors import UserError
from areal_x.tinker import losses, wire
from areal_x.tinker.data import MOST_TARGETS, Datum

MOST_ELEMENTS = 1 << 24  # of one array, whatever its shape claims
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}
NAMES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
OUTSIDE = "token ids are integers from 0 to 2³¹ - 1"
CHUNKS = {"encoded_text": 1, "image": 2, "dmel": 3}


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


class OfPath(Body):
    tinker_path: str


class Ttl(Body):
    ttl_seconds: int | None = None


class JsonDatum(Body):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]


class ForwardBackwardInput(Body):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonForwardBackward(Body):
    model_id: str
    seq_id: int
    forward_backward_input: ForwardBackwardInput | None = None
    forward_input: ForwardBackwardInput | None = None


class ForwardBackward(msgspec.Struct, kw_only=True):
    """Datums and their loss, from a body of either form. Checked."""

    model_id: str
    seq_id: int
    datums: list[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes) -> B:
    """Raises: UserError naming what is wrong with the body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the body is not a {kind.__name__} request: {error}") from error


def read_forward_backward(wire: bool, body: bytes, forward_only: bool) -> ForwardBackward:
    """Reads datums in either form; protocol buffers say themselves whether to compute a gradient.

    Raises: UserError.
    """
    if wire:
        return forward_backward_of_wire(body)
    return forward_backward_of_json(body, forward_only)


# ---- arrays and datums


def tokens_of(prompt: ModelInput) -> np.ndarray:
    """Returns the tokens of a prompt in JSON. Raises: UserError for images and audio."""
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"this server reads tokens, and the input has a chunk {chunk.type!r}")
    ids = [x for chunk in prompt.chunks for x in chunk.tokens]
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:  # numpy refuses longer integers
        raise UserError(OUTSIDE)
    return np.array(ids, np.int32)


def _as_tokens(ids: np.ndarray) -> np.ndarray:
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise UserError(OUTSIDE)
    return ids.astype(np.int32)


def _dense(
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


def _wire_tensor(data: bytes) -> np.ndarray:
    fields = wire.read(data)
    dtype = DTYPES.get(wire.number(fields, 3))
    if dtype is None:
        raise wire.Malformed("an array is neither float32 nor of integers")
    shape = [x if x < 1 << 63 else -1 for x in wire.numbers(fields, 4)]
    if not wire.messages(fields, 2):
        values = _array(wire.message(fields, 1), dtype)
        return _dense(values, shape or [values.size])
    sparse = wire.read(wire.message(fields, 2))
    rows, columns = (_array(wire.message(sparse, n), DTYPES[2]) for n in (2, 3))
    return _dense(_array(wire.message(sparse, 1), dtype), shape, rows, columns)


def _array(data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise wire.Malformed(f"{len(data)} bytes are no array of {dtype.name}")
    return np.frombuffer(data, dtype)


def _json_tensor(tensor: Tensor, absent: int = 0) -> np.ndarray:
    if tensor.dtype not in NAMES:
        raise UserError(f"an array is of float32 or int64, not {tensor.dtype!r}")
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinite then is refused as such
        values = np.array(tensor.data).astype(NAMES[tensor.dtype])
    shape = [values.size] if tensor.shape is None else tensor.shape
    if tensor.sparse_crow_indices is None:
        return _dense(values, shape)
    rows, columns = (
        np.array(x or [], np.int64) for x in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    )
    return _dense(values - absent, shape, rows, columns) + absent


def cells_of(tensor: Tensor, prompt: int) -> np.ndarray:
    """Returns the ids of target_prompt_logprobs, -1 where nothing is asked. prompt: its tokens.

    Raises: UserError.
    """
    ids = _json_tensor(tensor, absent=-1)
    if ids.dtype.kind != "i" or ids.ndim != 2 or len(ids) != prompt - 1 or not ids.size:
        raise UserError(
            "target_prompt_logprobs are integers in a row for each token of the prompt but the"
            f" first, {prompt - 1} rows"
        )
    if ids.shape[1] > MOST_TARGETS or ids.max() < 0:
        raise UserError(f"target_prompt_logprobs name from 1 to {MOST_TARGETS} ids a row")
    return np.where(ids < 0, -1, _as_tokens(np.maximum(ids, 0)))


def _datum(index: int, loss: str, tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> Datum:
    """Returns a checked datum. Raises: UserError."""
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise UserError(f"datum {index} lacks target_tokens")
    losses.check_inputs(loss, index, inputs)
    flat, count = targets.ndim == 1, len(tokens)
    shape = targets.shape
    if not count or targets.ndim not in (1, 2) or shape[0] != count or not targets.size:
        raise UserError(
            f"datum {index} has {count} tokens and target_tokens of the shape {list(shape)}: it"
            " needs a target, or a row of targets, for each token, and at least one token"
        )
    if not flat and shape[1] > MOST_TARGETS:
        raise UserError(f"datum {index} has {shape[1]} targets a token, at most {MOST_TARGETS}")
    found = {}
    for name, x in inputs.items():
        if x.shape != shape:
            raise UserError(
                f"datum {index} has {name} of the shape {list(x.shape)} beside target_tokens of"
                f" {list(shape)}"
            )
        if not np.isfinite(x).all():
            raise UserError(f"datum {index} has {name} that are not finite")
        found[name] = x.astype(np.float32).reshape(count, -1)
    if targets.dtype.kind != "i":
        raise UserError(f"datum {index} has target_tokens that are not integers")
    return Datum(tokens, _as_tokens(targets).reshape(count, -1), found, flat)


def forward_backward_of_json(body: bytes, forward_only: bool) -> ForwardBackward:
    """Raises: UserError."""
    request = read(JsonForwardBackward, body)
    given = request.forward_backward_input or request.forward_input
    if given is None:
        raise UserError("the body has no forward_backward_input")
    config = given.loss_fn_config or {}
    losses.find(given.loss_fn, config)
    datums = [
        _datum(
            index,
            given.loss_fn,
            tokens_of(datum.model_input),
            {name: _json_tensor(x) for name, x in datum.loss_fn_inputs.items()},
        )
        for index, datum in enumerate(given.data)
    ]
    return _checked(request.model_id, request.seq_id, datums, given.loss_fn, config, forward_only)


def forward_backward_of_wire(body: bytes) -> ForwardBackward:
    """Raises: UserError."""
    fields = wire.read(body)
    loss = wire.text(fields, 4)
    config: dict[str, float | str] = {
        key: (wire.doubles(pair, 2) or [0.0])[-1] for key, pair in wire.entries(fields, 5).items()
    }
    for key, pair in wire.entries(fields, 7).items():
        value = wire.read(wire.message(pair, 2))
        config[key] = wire.text(value, 2) if 2 in value else (wire.doubles(value, 1) or [0.0])[-1]
    losses.find(loss, config)
    datums = []
    for index, data in enumerate(wire.messages(fields, 3)):
        datum = wire.read(data)
        parts = []
        for chunk in (wire.read(x) for x in wire.messages(datum, 1)):
            if CHUNKS["encoded_text"] not in chunk:
                raise UserError(f"this server reads tokens, and datum {index} has images or audio")
            text = wire.read(wire.message(chunk, CHUNKS["encoded_text"]))
            parts.append(_array(wire.message(text, 1), DTYPES[3]))
        tokens = _as_tokens(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0))
        inputs = {
            name: _wire_tensor(wire.message(pair, 2))
            for name, pair in wire.entries(datum, 2).items()
        }
        datums.append(_datum(index, loss, tokens, inputs))
    return _checked(
        wire.text(fields, 1),
        wire.number(fields, 2),
        datums,
        loss,
        config,
        bool(wire.number(fields, 6)),
    )


def _checked(
    model_id: str,
    seq_id: int,
    datums: list[Datum],
    loss: str,
    config: Mapping[str, float | str],
    forward_only: bool,
) -> ForwardBackward:
    if not datums:
        raise UserError("the request has no data")
    return ForwardBackward(
        model_id=model_id,
        seq_id=seq_id,
        datums=datums,
        loss=loss,
        config=config,
        forward_only=forward_only,
    )
