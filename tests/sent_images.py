"""Reads what a vLLM server is given of an image."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from areal_x.engines.vllm.features import RAW


def arrays_of(packed: str) -> dict[str, tuple[np.ndarray, str]]:
    """Each array of an image by its name, and how those of several images are batched."""
    import msgpack

    def read(entry: dict[str, Any]) -> tuple[np.ndarray, str]:
        kind, shape, data = entry["data"]
        return np.frombuffer(data, kind).reshape(shape), entry["field"][0]

    found = msgpack.unpackb(base64.b64decode(packed), ext_hook=lambda code, data: data if code == RAW else None)
    return {name: read(entry) for name, entry in found.items()}
