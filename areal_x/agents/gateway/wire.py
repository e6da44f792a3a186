"""Values as bytes, for the channel between the process of the run and those of the gateway's
workers: a JSON header, then arrays and bytes one after the other.

Only the classes below can be decoded, by their names: nothing received is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from areal_x.agents.chat.dialogue import ChatAnswer
from areal_x.agents.chat.parsing import Reply, ToolCall
from areal_x.agents.chat.prompts import CachedReply
from areal_x.agents.gateway.exchange import CallAnswer, RequestedSampling
from areal_x.agents.gateway.retries import Attempt, SentAnswer
from areal_x.agents.gateway.session import StoredResponse
from areal_x.agents.gateway.session_state import SessionLimits
from areal_x.agents.gateway.work import Assignment
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.types import Images, Kept

CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Assignment,
        Attempt,
        CachedReply,
        CallAnswer,
        ChatAnswer,
        Completion,
        Images,
        Kept,
        Reply,
        Request,
        RequestedSampling,
        SamplingParams,
        SentAnswer,
        SessionLimits,
        StoredResponse,
        ToolCall,
    )
}
FIELDS = {kind: tuple(f.name for f in fields(kind) if f.init) for kind in CLASSES.values()}
NUMBERS = "biuf"  # kinds of arrays, by numpy's names
HEADER = struct.Struct("<I")  # the length of the JSON
LONG = 512  # characters of a text that is sent outside the JSON, which would escape it
# In the JSON, everything but a short text, a number, a truth value and null is a list that begins
# with one of these.
LIST, TUPLE, MAPPING, OBJECT, ARRAY, BYTES, TEXT = range(7)


def dumps(value: Any) -> bytes:
    """Encodes None, texts, numbers, bytes, arrays, lists, tuples, mappings with texts as keys, and
    objects of the classes above. Raises: TypeError for anything else."""
    parts: list[bytes] = [b"", b""]

    def plain(value: Any) -> Any:
        if isinstance(value, str) and len(value) > LONG:
            content = value.encode("utf-8", "surrogatepass")
            parts.append(content)
            return [TEXT, len(content)]
        if value is None or isinstance(value, str | int | float):  # bool is an int
            return value
        if isinstance(value, bytes):
            parts.append(value)
            return [BYTES, len(value)]
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in NUMBERS:
                raise TypeError(f"an array of {value.dtype} cannot be sent")
            content = value.tobytes()
            parts.append(content)
            return [ARRAY, len(content), value.dtype.str, value.shape]
        if isinstance(value, tuple):
            return [TUPLE, *map(plain, value)]
        if isinstance(value, list):
            return [LIST, *map(plain, value)]
        if isinstance(value, Mapping):
            return [MAPPING, {str(key): plain(one) for key, one in value.items()}]
        names = FIELDS.get(type(value))
        if names is None:
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        return [OBJECT, type(value).__name__, *(plain(getattr(value, name)) for name in names)]

    parts[1] = json.dumps(plain(value), separators=(",", ":")).encode()
    parts[0] = HEADER.pack(len(parts[1]))
    return b"".join(parts)


def loads(data: bytes | memoryview) -> Any:
    """Decodes what `dumps` returned. Raises: ValueError for anything else."""
    view = memoryview(data)
    end = HEADER.size + HEADER.unpack_from(view)[0]
    header = json.loads(bytes(view[HEADER.size : end]))

    def taken(size: int) -> memoryview:
        nonlocal end
        if size < 0 or end + size > len(view):
            raise ValueError("a message is shorter than its header says")
        piece = view[end : end + size]
        end += size
        return piece

    def made(plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        if kind == TUPLE:
            return tuple(map(made, rest))
        if kind == LIST:
            return [made(one) for one in rest]
        if kind == MAPPING:
            return {key: made(one) for key, one in rest[0].items()}
        if kind == BYTES:
            return bytes(taken(rest[0]))
        if kind == TEXT:
            return str(taken(rest[0]), "utf-8", "surrogatepass")
        if kind == ARRAY:
            size, name, shape = rest
            dtype = np.dtype(str(name))
            if dtype.kind not in NUMBERS:
                raise ValueError(f"an array of {dtype} is not received")
            # copied: a view would keep the whole message
            return np.frombuffer(taken(size), dtype).reshape(shape).copy()
        if kind != OBJECT or rest[0] not in CLASSES:
            raise ValueError(f"{str(plain)[:100]} is not received")
        cls = CLASSES[rest[0]]
        return cls(**dict(zip(FIELDS[cls], map(made, rest[1:]), strict=True)))

    return made(header)
