"""What a request comes to, in the API's two forms: JSON, and protocol buffers for arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.tinker import wire

FLOAT32 = 1
STOP, LENGTH = 0, 1


@dataclass(frozen=True)
class Result:
    """A finished request. wire: for those whose client accepts protocol buffers; None if the API has
    no such form."""

    json: Mapping[str, Any]
    wire: bytes | None = None

    @property
    def size(self) -> int:
        """About its bytes in memory."""
        return 1024 if self.wire is None else 4 * len(self.wire) + 1024


@dataclass(frozen=True)
class Failure:
    """A request that failed. category: "user" for a mistake in it, "server" for one here."""

    error: str
    category: str

    @property
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
    return Result(
        {
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
        },
        wire.block(1, kind) + records + numbers,
    )


def number(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence."""

    tokens: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " n"]
    stopped: bool


def samples(
    sequences: Sequence[SampledSequence], prompt_logprobs: Float32[np.ndarray, " prompt"] | None
) -> Result:
    """prompt_logprobs: NaN where there is none."""
    written = b""
    for one in sequences:
        written += wire.block(
            1,
            wire.integer(1, STOP if one.stopped else LENGTH)
            + wire.block(2, np.ascontiguousarray(one.tokens, "<i4").tobytes())
            + wire.block(3, np.ascontiguousarray(one.logprobs, "<f4").tobytes()),
        )
    prompt = None
    if prompt_logprobs is not None:
        written += wire.block(2, np.ascontiguousarray(prompt_logprobs, "<f4").tobytes())
        prompt = [number(x) for x in prompt_logprobs.tolist()]
    return Result(
        {
            "type": "sample",
            "sequences": [
                {
                    "tokens": one.tokens.tolist(),
                    "logprobs": [number(x) for x in one.logprobs.tolist()],
                    "stop_reason": "stop" if one.stopped else "length",
                }
                for one in sequences
            ],
            "prompt_logprobs": prompt,
        },
        written,
    )
