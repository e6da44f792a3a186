"""Compares what the workers of a server report of their weights with what the trainer published. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from areal_x.engines.fleet.proof.claims import Claim, Claims, natural
from areal_x.engines.fleet.proof.sums import Sums
from areal_x.protocols.engine import EngineError

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A part of a published tensor as it stands in a worker."""

    tensor: str
    """Its Hugging Face name."""

    use: str
    """What the worker has it for: the name of its own parameter, and how that is read."""

    box: Box
    """First index and the one after the last, along each axis of the published tensor."""

    dtype: str

    sums: Sums | None
    """None if nothing stands there."""


@dataclass(frozen=True)
class Report:
    """What one worker has."""

    parts: Sequence[Part]

    unproved: Mapping[str, str] = field(default_factory=dict)
    """Parameters that it cannot read back, with the reasons."""

    wrong: Mapping[str, str] = field(default_factory=dict)
    """Tensors in whose place it found something that no published tensor can be, with what it is."""


@dataclass(frozen=True)
class Verdict:
    """What the reports of a server's workers show."""

    differences: Sequence[str] = ()
    """Sentences, each about one tensor."""

    unproved: Mapping[str, str] = field(default_factory=dict)

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Tensors that it has in a type of which nothing is claimed. They are not judged."""


def judge(claims: Claims, reports: Sequence[Report]) -> Verdict:
    """Judges the reports of all workers of a server."""
    unproved = {name: why for report in reports for name, why in report.unproved.items()}
    differences = [
        f"{name} {what}" for report in reports for name, what in sorted(report.wrong.items())
    ]
    uses: dict[tuple[str, str], list[tuple[int, Part]]] = defaultdict(list)
    for worker, report in enumerate(reports):
        for part in report.parts:
            uses[part.tensor, part.use].append((worker, part))
    dtypes: dict[str, str] = {}
    for (name, use), parts in uses.items():
        claim = claims.tensors.get(name)
        if claim is None:
            continue  # of a question about another version
        kinds = {part.dtype for _, part in parts}
        if len(kinds) > 1:
            differences.append(f"{name} is {' and '.join(sorted(kinds))} ({use})")
        elif (kind := kinds.pop()) not in claim.sums:
            dtypes[name] = kind
        elif (what := difference(claim, claim.sums[kind], parts)) is not None:
            differences.append(f"{name} {what} ({use})")
    found = {name for name, _ in uses}
    for name in claims.tensors.keys() - found:
        if not any(name in report.wrong for report in reports):
            unproved.setdefault(name, "the server has no place for it that was found")
    return Verdict(differences, unproved, dtypes)


def difference(claim: Claim, claimed: Sums, parts: Sequence[tuple[int, Part]]) -> str | None:
    """Returns what is wrong with one use of a tensor, or None. parts: with the number of the worker.

    The parts at different places must cover the tensor once, and their sums add up to the claim; parts
    at the same place must be alike.
    """
    shape = claim.shape or (1,)
    first: dict[Box, tuple[int, Part]] = {}
    for worker, part in parts:
        if not stands_in(part.box, shape):
            return f"has a part at {part.box}, and the published one has the shape {shape}"
        if part.sums is None:
            return f"is missing in worker {worker}"
        other, same = first.setdefault(part.box, (worker, part))
        if same.sums != part.sums:
            return f"is not the same in the workers {other} and {worker}"
    covered = sum(prod(stop - start for start, stop in box) for box in first)
    if covered != prod(shape):
        return f"has {covered} of the {prod(shape)} published numbers"
    total = sum((part.sums for _, part in first.values() if part.sums is not None), Sums())
    if total == claimed:
        return None
    if total.plain == claimed.plain:
        return "has the published numbers in other places"
    return "has other numbers"


def stands_in(box: Box, shape: Sequence[int]) -> bool:
    """Returns whether there is such a part of a tensor."""
    return len(box) == len(shape) and all(
        0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def sentence(server: str, version: int, differences: Sequence[str], workers: str = "") -> str:
    """Returns the sentence that names the server, the version and the first tensor. workers: names those
    that have other numbers of it."""
    more = len(differences) - 1
    rest = f"{workers} ({more} more differ)" if more else workers
    return f"{server} does not use the weights of version {version}: {differences[0]}{rest}"


def parsed(answer: Any) -> Report:
    """Returns the report in a worker's answer. Raises: EngineError for another answer, or with what
    went wrong in the worker."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise EngineError(answer["error"])
    try:
        return Report(
            [part_of(*part) for part in answer["parts"]],
            {str(name): str(why) for name, why in answer["unproved"].items()},
            {str(name): str(what) for name, what in answer["wrong"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"a worker's report of its weights cannot be read: {error}") from error


def part_of(
    tensor: str, use: str, box: Iterable[Sequence[int]], dtype: str, sums: Sequence[int] | None
) -> Part:
    bounds = tuple((natural(start), natural(stop)) for start, stop in box)
    found = None if sums is None else Sums(natural(sums[0]), natural(sums[1]))
    return Part(str(tensor), str(use), bounds, str(dtype), found)
