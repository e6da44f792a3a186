"""Datums and their loss, as the API's clients send them: JSON, or protocol buffers, whose field numbers
are those of the client's tinker_public.proto. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from areal_x.errors import UserError
from areal_x.tinker import losses, wire
from areal_x.tinker.data import MOST_TARGETS, Datum
from areal_x.tinker.requests import (
    MOST_ELEMENTS,
    Body,
    ModelInput,
    Tensor,
    as_tokens,
    dense,
    json_tensor,
    read,
    tokens_of,
)

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}
CHUNKS = {"encoded_text": 1, "image": 2, "dmel": 3}


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


def read_forward_backward(wire: bool, body: bytes, forward_only: bool) -> ForwardBackward:
    """Reads datums in either form; protocol buffers say themselves whether to compute a gradient.

    Raises: UserError.
    """
    if wire:
        return forward_backward_of_wire(body)
    return forward_backward_of_json(body, forward_only)


def _wire_tensor(data: bytes) -> np.ndarray:
    fields = wire.read(data)
    dtype = DTYPES.get(wire.number(fields, 3))
    if dtype is None:
        raise wire.Malformed("an array is neither float32 nor of integers")
    shape = [x if x < 1 << 63 else -1 for x in wire.numbers(fields, 4)]
    if not wire.messages(fields, 2):
        values = _array(wire.message(fields, 1), dtype)
        return dense(values, shape or [values.size])
    sparse = wire.read(wire.message(fields, 2))
    rows, columns = (_array(wire.message(sparse, n), DTYPES[2]) for n in (2, 3))
    return dense(_array(wire.message(sparse, 1), dtype), shape, rows, columns)


def _array(data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise wire.Malformed(f"{len(data)} bytes are no array of {dtype.name}")
    return np.frombuffer(data, dtype)


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
    return Datum(tokens, as_tokens(targets).reshape(count, -1), found, flat)


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
            {name: json_tensor(x) for name, x in datum.loss_fn_inputs.items()},
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
        tokens = as_tokens(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0))
        inputs = {
            name: _wire_tensor(wire.message(pair, 2))
            for name, pair in wire.entries(datum, 2).items()
        }
        if losses.counts_samples(loss):
            inputs[losses.COUNTED] = _sampled(index, loss, wire.messages(datum, 4))
        datums.append(_datum(index, loss, tokens, inputs))
    return _checked(
        wire.text(fields, 1),
        wire.number(fields, 2),
        datums,
        loss,
        config,
        bool(wire.number(fields, 6)),
    )


def _sampled(index: int, loss: str, spans: Sequence[bytes]) -> np.ndarray:
    """Returns which targets were sampled, by a datum's provenance: runs of a prompt's tokens (field
    1) and of sampled ones (field 2), whose length is field 3.

    Raises: UserError.
    """
    if not spans:
        raise UserError(
            f"datum {index} has no provenance, and {loss} trains on the targets that"
            " Datum.with_provenance names as sampled"
        )
    read = [wire.read(span) for span in spans]
    sampled = [2 in span for span in read]
    lengths = [
        wire.number(wire.read(wire.message(span, 2 if own else 1)), 3)
        for span, own in zip(read, sampled, strict=True)
    ]
    if sum(lengths) > MOST_ELEMENTS:
        raise UserError(f"datum {index} has a provenance of more than {MOST_ELEMENTS} targets")
    return np.repeat(np.array(sampled, np.float32), lengths)


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
