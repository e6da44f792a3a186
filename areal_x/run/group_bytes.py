"""Encodes a group as bytes: a compressed JSON header, then the arrays one after the other.

A general compressor takes most of a core and hardly saves more of tokens and log-probabilities than
their zero bytes. So masks and versions are run-length encoded, other integers are stored in as few
bytes as they need, and floats as they are.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from areal_x.runtime.distinct_images import DistinctImages, images_of
from areal_x.types import (
    Episode,
    Failed,
    Group,
    Images,
    Kept,
    Outcome,
    Scored,
    Task,
    TimedOut,
    Trajectory,
)

OUTCOMES: dict[str, type[Outcome]] = {"scored": Scored, "failed": Failed, "timed_out": TimedOut}
# Fields of a trajectory that are arrays.
ARRAYS = ("tokens", "mask", "logprobs", "versions", "token_rewards", "experts", "credit")
# Of each kind of outcome, what it is called and its fields. (`fields` takes longer than all else.)
NAMES = {kind: (name, [f.name for f in fields(kind)]) for name, kind in OUTCOMES.items()}
IMAGES = [f.name for f in fields(Images)]
RUN = 16  # bytes of one run, roughly
SIZE = 4  # bytes of the header's length
U1, U2, U4 = (np.dtype(name) for name in ("<u1", "<u2", "<u4"))


def encode(group: Group) -> bytes:
    """Returns a group as bytes, except its task, ticket and version, which are columns of the
    journal."""
    trajectories = [trajectory for episode in group.episodes for trajectory in episode.trajectories]
    parts: list[bytes] = []

    def put(x: np.ndarray) -> list[Any]:
        form, content = encode_array(x)
        parts.append(content)
        return [len(content), *form]

    def joined(name: str) -> list[Any]:
        """A flag per trajectory that has the array, and these arrays concatenated."""
        arrays = [getattr(t, name) for t in trajectories]
        there = [x for x in arrays if x is not None]
        return [[x is not None for x in arrays], put(np.concatenate(there)) if there else None]

    def kept_ids() -> list[Any]:
        """A flag per trajectory that has them, and the counts and ids of these concatenated."""
        has = [t.kept is not None for t in trajectories]
        kept = [t.kept for t in trajectories if t.kept is not None]
        if not kept:
            return [has, None]
        whole = Kept.joined(kept)
        return [has, [put(whole.counts), put(whole.ids)]]

    distinct = DistinctImages()
    shown = [None if t.images is None else distinct.add(t.images) for t in trajectories]

    def outcome_fields(outcome: Outcome) -> list[Any]:
        name, named = NAMES[type(outcome)]
        return [name, {field: getattr(outcome, field) for field in named}]

    head = {
        "episodes": [[outcome_fields(e.outcome), len(e.trajectories)] for e in group.episodes],
        "images": [
            {name: put(getattr(image, name)) for name in IMAGES} for image in distinct.images
        ],
        "trajectories": [
            [len(t.tokens), t.reward, t.finish_reason, numbers]
            for t, numbers in zip(trajectories, shown, strict=True)
        ],
        "arrays": {name: joined(name) for name in ARRAYS},
        "kept": kept_ids(),
        "greedy_reward": group.greedy_reward,
    }
    header = zlib.compress(JSON.encode(head).encode(), 1)
    return b"".join([len(header).to_bytes(SIZE, "little"), header, *parts])


def read_head(content: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header of an encoded group, of whose bytes only the first are needed, and where
    its arrays begin."""
    at = SIZE + int.from_bytes(content[:SIZE], "little")
    head: dict[str, Any] = json.loads(zlib.decompress(content[SIZE:at]))
    return head, at


def decode(content: bytes, task: Task, ticket: int, admitted_version: int) -> Group:
    """Returns the group that `encode` was given."""
    head, at = read_head(content)
    lengths = [length for length, *_ in head["trajectories"]]

    def get(described: list[Any]) -> Any:
        nonlocal at
        size, *form = described
        x = decode_array(form, content[at : at + size])
        at += size
        return x

    def split(has: list[bool], described: list[Any] | None = None) -> list[Any]:
        if described is None:
            return [None] * len(has)
        ends = np.cumsum([length for length, there in zip(lengths, has, strict=True) if there])
        each = iter(np.split(get(described), ends[:-1]))
        return [next(each) if there else None for there in has]

    def images(described: dict[str, list[Any]]) -> Images:
        return Images(**{name: get(y) for name, y in described.items()})

    shown = [x for *_, x in head["trajectories"]]
    seen: list[Images | None] = []
    if "images" in head:
        distinct = [images(described) for described in head["images"]]
        seen = images_of(distinct, (None if x is None else tuple(x) for x in shown))
    else:  # older journals: beside the first trajectory that has them, the others name that one
        for x in shown:
            seen.append(seen[x] if isinstance(x, int) else x and images(x))
    # Arrays that this version added are absent from older journals.
    missing = [[False] * len(lengths)]
    arrays = {name: split(*head["arrays"].get(name, missing)) for name in ARRAYS}
    has_kept, described = head.get("kept", [*missing, None])
    counts = split(has_kept, described and described[0])
    every_id = np.zeros(0, np.int32) if described is None else get(described[1])
    ends = np.cumsum([0 if x is None else x.sum() for x in counts], dtype=np.int64)
    ids = np.split(every_id, ends[:-1])
    trajectories = iter(
        [
            Trajectory(
                **{name: arrays[name][i] for name in ARRAYS},
                reward=reward,
                finish_reason=reason,
                images=seen[i],
                kept=None if counts[i] is None else Kept(counts[i], ids[i]),
            )
            for i, (_, reward, reason, _) in enumerate(head["trajectories"])
        ]
    )
    episodes = tuple(
        Episode(OUTCOMES[kind](**values), tuple(islice(trajectories, count)))
        for (kind, values), count in head["episodes"]
    )
    return Group(task, ticket, admitted_version, episodes, head["greedy_reward"])


def encode_array(x: np.ndarray) -> tuple[list[Any], bytes]:
    """Returns the form in which an array is stored, for `decode_array`, and its bytes."""
    dtype, shape = _stored(x.dtype), list(x.shape)
    if x.size and x.dtype.kind in "bi":
        flat = x.reshape(-1).view(np.uint8) if x.dtype.kind == "b" else x.reshape(-1)
        changes = flat[1:] != flat[:-1]
        if np.count_nonzero(changes) * RUN <= flat.size:
            ends = changes.nonzero()[0]
            last = [*(ends + 1).tolist(), len(flat)]
            return [dtype, shape, "runs", last, [*flat[ends].tolist(), flat[-1].item()]], b""
        low = int(flat.min())
        if (bits := (int(flat.max()) - low).bit_length()) <= 24 and x.itemsize * 8 > bits:
            above = flat.astype(U4) - np.array(low).astype(U4)
            parts = [above.astype(U2), above >> 16] if bits > 16 else [above]
            parts[-1] = parts[-1].astype(U2 if 8 < bits <= 16 else U1)
            each = [_stored(part.dtype) for part in parts]
            return [dtype, shape, "above", low, each], b"".join(x.tobytes() for x in parts)
    return [dtype, shape, "plain"], x.astype(dtype, copy=False).tobytes()


@cache
def _stored(dtype: np.dtype[Any]) -> str:
    """The name of a little-endian type."""
    return dtype.newbyteorder("<").str


def decode_array(stored: Sequence[Any], content: bytes) -> np.ndarray:
    """Returns the array that `encode_array` stored."""
    dtype, shape, form, *rest = stored
    size, at = math.prod(shape), 0
    if form == "plain":
        return np.frombuffer(content, dtype).reshape(shape)
    if form == "runs":
        ends, values = rest
        return np.repeat(np.asarray(values, dtype), np.diff(ends, prepend=0)).reshape(shape)
    low, parts = rest
    x = np.full(size, low, "<i8")
    for place, part in enumerate(parts):
        x += np.frombuffer(content, part, size, at).astype("<i8") << 16 * place
        at += size * np.dtype(part).itemsize
    return x.astype(dtype).reshape(shape)


def _number(x: Any) -> Any:
    """Converts numpy numbers, which a verifier may return, for JSON."""
    return x.item()


JSON = json.JSONEncoder(default=_number)
