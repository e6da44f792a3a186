"""What a request comes to, in the API's two forms: JSON, and protocol buffers for arrays.

The journal keeps a result as protocol buffers where it has them, from which a restarted server makes
the JSON too (`stored`, `restored`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
from jaxtyping import Float32, Int32

from areal_x.tinker import wire

FLOAT32 = 1
STOP, LENGTH = 0, 1


@dataclass(frozen=True)
class Result:
    """A finished request. json: makes that form, for which arrays take time. wire: for those whose
    client accepts protocol buffers; None if the API has no such form. form: the key of READERS for
    it."""

    json: Callable[[], Mapping[str, Any]]
    wire: bytes | None = None
    form: str = "plain"

    @property
    def size(self) -> int:
        """About its bytes in memory."""
        return 1024 if self.wire is None else 4 * len(self.wire) + 1024


def plain(content: Mapping[str, Any]) -> Result:
    """Returns a result without arrays."""
    return Result(lambda: content)


@dataclass(frozen=True)
class Failure:
    """A request that failed. category: "user" for a mistake in it, "server" for one here."""

    error: str
    category: str
    size: ClassVar[int] = 1024

    def json(self) -> Mapping[str, Any]:
        return {"error": self.error, "category": self.category}


def forward_backward(
    outputs: Sequence[Mapping[str, Float32[np.ndarray, ...]]], metrics: Mapping[str, float]
) -> Result:
    """outputs: of each datum, arrays by name, the same names for all."""
    kind = "ArrayRecord"
    records = b""
    for datum in outputs:  # a record each: datums may have arrays of other widths
        fields = b""
        for name, x in datum.items():
            data = np.ascontiguousarray(x, "<f4").tobytes()
            offsets = np.array([0, len(data)], "<i8").tobytes()
            sides = b"".join(wire.integer(4, side) for side in x.shape[1:])
            tensor = wire.block(1, data) + wire.block(2, offsets) + wire.integer(3, FLOAT32) + sides
            fields += wire.entry(2, name, wire.block(2, tensor))
        records += wire.block(2, wire.block(1, kind) + fields + wire.integer(3, 1))
    numbers = b"".join(wire.entry(3, name, wire.double(2, float(x))) for name, x in metrics.items())

    def json() -> Mapping[str, Any]:
        return {
            "loss_fn_output_type": kind,
            "loss_fn_outputs": [
                {
                    name: {
                        "data": [number(v) for v in x.ravel().tolist()],
                        "dtype": "float32",
                        "shape": list(x.shape),
                    }
                    for name, x in datum.items()
                }
                for datum in outputs
            ],
            "metrics": {name: number(float(x)) for name, x in metrics.items()},
        }

    return Result(json, wire.block(1, kind) + records + numbers, "forward_backward")


def number(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


NONE = 0, -99999.0  # what stands for a token that is not there in a table of the most likely ones


@dataclass(frozen=True)
class Top:
    """The most likely tokens at each position, -1 where there are fewer, with log-probabilities."""

    ids: Int32[np.ndarray, "positions k"]
    logprobs: Float32[np.ndarray, "positions k"]

    def written(self) -> bytes:
        there = self.ids >= 0
        ids, logprobs = np.where(there, self.ids, NONE[0]), np.where(there, self.logprobs, NONE[1])
        return (
            wire.block(1, np.ascontiguousarray(ids, "<i4").tobytes())
            + wire.block(2, np.ascontiguousarray(logprobs, "<f4").tobytes())
            + wire.integer(3, self.ids.shape[1])
            + wire.integer(4, self.ids.shape[0])
        )

    def json(self) -> list[list[tuple[int, float]] | None]:
        rows = zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        return [[x for x in zip(*row, strict=True) if x[0] >= 0] or None for row in rows]


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence."""

    tokens: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " n"]
    stopped: bool
    top: Top | None = None


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a prompt's tokens, NaN where there is none; of the most likely ones, and of
    those that the request names, of which sparse ones have the indices (rows, columns) of CSR."""

    logprobs: Float32[np.ndarray, " prompt"] | None = None
    top: Top | None = None
    named: Float32[np.ndarray, "prompt-1 k"] | None = None
    sparse: tuple[Sequence[int], Sequence[int]] | None = None

    def written(self) -> bytes:
        found = b""
        if self.logprobs is not None:
            found += wire.block(2, np.ascontiguousarray(self.logprobs, "<f4").tobytes())
        if self.top is not None:
            found += wire.block(3, self.top.written())
        if self.named is not None:
            sides = b"".join(wire.integer(4, side) for side in self.named.shape)
            if self.sparse is None:
                values = wire.block(1, self.named.astype("<f4").tobytes())
            else:
                rows, columns = (np.array(x, "<i8") for x in self.sparse)
                own = self.named[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns]
                parts = (own.astype("<f4"), rows, columns)
                csr = b"".join(wire.block(n, x.tobytes()) for n, x in enumerate(parts, 1))
                values = wire.block(2, csr)
            found += wire.block(5, values + wire.integer(3, FLOAT32) + sides)
        return found

    def json(self) -> dict[str, Any]:
        logprobs, named = self.logprobs, self.named
        return {
            "prompt_logprobs": None if logprobs is None else [number(x) for x in logprobs.tolist()],
            "topk_prompt_logprobs": None if self.top is None else self.top.json(),
            "target_prompt_logprobs": None
            if named is None
            else {"data": named.ravel().tolist(), "dtype": "float32", "shape": list(named.shape)},
        }


def samples(sequences: Sequence[SampledSequence], prompt: Scored) -> Result:
    written = b""
    for one in sequences:
        top = b"" if one.top is None else wire.block(4, one.top.written())
        written += wire.block(
            1,
            wire.integer(1, STOP if one.stopped else LENGTH)
            + wire.block(2, np.ascontiguousarray(one.tokens, "<i4").tobytes())
            + wire.block(3, np.ascontiguousarray(one.logprobs, "<f4").tobytes())
            + top,
        )

    def found(one: SampledSequence) -> dict[str, Any]:
        return {
            "tokens": one.tokens.tolist(),
            "logprobs": [number(x) for x in one.logprobs.tolist()],
            "stop_reason": "stop" if one.stopped else "length",
            "topk_logprobs": None if one.top is None else one.top.json(),
        }

    def json() -> Mapping[str, Any]:
        return {"type": "sample", "sequences": [*map(found, sequences)], **prompt.json()}

    return Result(json, written + prompt.written(), "samples")


# ---- for the journal


def stored(outcome: Result | Failure) -> bytes:
    if isinstance(outcome, Failure):
        return msgspec.msgpack.encode(("failure", outcome.error, outcome.category))
    if outcome.wire is None:
        return msgspec.msgpack.encode((outcome.form, outcome.json()))
    return msgspec.msgpack.encode((outcome.form, outcome.wire))


def restored(data: bytes) -> Result | Failure:
    """Returns an outcome that `stored` wrote; its JSON is made when it is asked for."""
    form, *content = msgspec.msgpack.decode(data)
    if form == "failure":
        return Failure(*content)
    if form == "plain":
        return plain(content[0])
    return Result(lambda: READERS[form](content[0]).json(), content[0], form)


def _floats(data: bytes) -> Float32[np.ndarray, " n"]:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _read_forward_backward(data: bytes) -> Result:
    fields = wire.read(data)
    outputs = []
    for record in wire.messages(fields, 2):
        arrays = {}
        for name, pair in wire.entries(wire.read(record), 2).items():
            tensor = wire.read(wire.message(pair, 2))
            sides = wire.numbers(tensor, 4)
            arrays[name] = _floats(wire.message(tensor, 1)).reshape(-1, *sides)
        outputs.append(arrays)
    metrics = {name: wire.doubles(x, 2)[0] for name, x in wire.entries(fields, 3).items()}
    return forward_backward(outputs, metrics)


def _read_top(data: bytes) -> Top:
    fields = wire.read(data)
    shape = wire.number(fields, 4), wire.number(fields, 3)
    ids = np.frombuffer(wire.message(fields, 1), "<i4").reshape(shape)
    logprobs = _floats(wire.message(fields, 2)).reshape(shape)
    return Top(np.where(logprobs == np.float32(NONE[1]), -1, ids), logprobs)


def _read_named(data: bytes) -> Float32[np.ndarray, "prompt-1 k"]:
    fields = wire.read(data)
    shape = wire.numbers(fields, 4)
    if 1 in fields:
        return _floats(wire.message(fields, 1)).reshape(shape)
    sparse = wire.read(wire.message(fields, 2))
    rows, columns = (np.frombuffer(wire.message(sparse, n), "<i8") for n in (2, 3))
    found = np.zeros(shape, np.float32)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = _floats(wire.message(sparse, 1))
    return found


def _read_samples(data: bytes) -> Result:
    fields = wire.read(data)
    sequences = []
    for one in map(wire.read, wire.messages(fields, 1)):
        tokens = np.frombuffer(wire.message(one, 2), "<i4")
        top = _read_top(wire.message(one, 4)) if 4 in one else None
        stopped = wire.number(one, 1) == STOP
        sequences.append(SampledSequence(tokens, _floats(wire.message(one, 3)), stopped, top))
    logprobs = _floats(wire.message(fields, 2)) if 2 in fields else None
    top = _read_top(wire.message(fields, 3)) if 3 in fields else None
    named = _read_named(wire.message(fields, 5)) if 5 in fields else None
    return samples(sequences, Scored(logprobs, top, named))


READERS = {"forward_backward": _read_forward_backward, "samples": _read_samples}
