"""Which of a server's workers have other numbers of a tensor than were published."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_x.engines.fleet.proof.claims import Claims, claimed_numbers
from areal_x.engines.fleet.proof.judge import Box, Report, stands_in
from areal_x.engines.fleet.proof.sums import (
    Sums,
    as_slice,
    bits_in,
    columns,
    of_bits,
    places,
    within,
)


def workers_with_others(
    claims: Claims, reports: Sequence[Report], name: str, tensor: np.ndarray
) -> list[int]:
    """Returns the numbers of the workers whose parts of a tensor are not those of the published one.

    Claims are of whole tensors: of slices that do not add up they do not tell which one is wrong.
    """
    shape = tensor.shape or (1,)
    indices = columns(claims.version, shape, claims.full)
    parts = [
        (worker, part)
        for worker, report in enumerate(reports)
        for part in report.parts
        if part.tensor == name and part.sums is not None and stands_in(part.box, shape)
    ]
    numbers = {
        dtype: claimed_numbers(tensor, dtype, claims.scale, name).reshape(shape)
        for dtype in {part.dtype for _, part in parts}
    }
    return sorted(
        {
            worker
            for worker, part in parts
            if part.sums != sums_in(numbers[part.dtype], part.box, indices, part.dtype)
        }
    )


def sums_in(x: np.ndarray, box: Box, indices: range, dtype: str) -> Sums:
    """Returns the sums of a part of a published tensor. indices: those that are proved along its last
    axis."""
    slices = [slice(*bounds) for bounds in box[:-1]] + [as_slice(within(indices, *box[-1]))]
    weights = [places(axis, size)[slices[axis]] for axis, size in enumerate(x.shape)]
    return of_bits(bits_in(np.ascontiguousarray(x[tuple(slices)]), dtype), dtype, weights)


def in_workers(workers: Sequence[int], count: int) -> str:
    """Returns the words that name these workers; none if they are all."""
    if not 0 < len(workers) < count:
        return ""
    numbers = " and ".join(map(str, workers))
    return f"; workers {numbers} are wrong" if len(workers) > 1 else f"; worker {numbers} is wrong"
