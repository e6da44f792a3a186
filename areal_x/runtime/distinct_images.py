"""Images of several sequences with one copy of those that are equal: the attempts of a group at one task
have the same, and a turn of a conversation has those of the turns before it.

    sequences' images ──DistinctImages.add──▶ numbers ──▶ stored or sent ──images_of──▶ sequences' images
                                          └─▶ images, each once ─┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from areal_x.types import Images

COMPARED = 16  # patches that tell most images apart; those that agree in them are compared whole

Numbers = tuple[int, ...]
"""Of a sequence's images, in the order of its tokens."""


class DistinctImages:
    """Collects the images of sequences and numbers them: equal ones, bit for bit, have one number.

    Objects that were added before are recognised without a look at their patches. Comparing two equal
    images costs about as much as a copy of one.
    """

    def __init__(self) -> None:
        self.images: list[Images] = []
        """By number; one image each."""
        self._numbered: dict[int, tuple[Images, Numbers]] = {}  # by id; holds what has the id
        self._alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)

    def add(self, images: Images) -> Numbers:
        """Returns the numbers of a sequence's images."""
        if id(images) not in self._numbered:
            self._numbered[id(images)] = images, tuple(map(self._number, each_of(images)))
        return self._numbered[id(images)][1]

    def _number(self, image: Images) -> int:
        patches = image.patches
        few = patches[:: max(1, len(patches) // COMPARED)]
        alike = self._alike[image.grids.tobytes(), patches.dtype.str.encode(), few.tobytes()]
        for number in alike:
            if _are_equal(self.images[number].patches, patches):
                return number
        alike.append(len(self.images))
        self.images.append(image)
        return alike[-1]


def each_of(images: Images) -> Iterator[Images]:
    """Yields the images of a sequence one by one, without copies."""
    ends = np.cumsum(np.prod(images.grids, axis=1, dtype=np.int64))
    if len(ends) < 2:
        yield images
        return
    for number, end in enumerate(ends.tolist()):
        start = int(ends[number - 1]) if number else 0
        yield Images(images.patches[start:end], images.grids[number : number + 1])


def images_of(images: Sequence[Images], numbers: Iterable[Numbers | None]) -> list[Images | None]:
    """Returns the images of sequences from the numbers of each; None for a sequence without. Those with
    the same numbers share one object."""
    made: dict[Numbers | None, Images | None] = {None: None}
    found = []
    for own in numbers:
        if own not in made:
            parts = [images[number] for number in own or ()]
            made[own] = parts[0] if len(parts) == 1 else _joined(parts)
        found.append(made[own])
    return found


def _joined(parts: Sequence[Images]) -> Images:
    return Images(
        np.concatenate([part.patches for part in parts]),
        np.concatenate([part.grids for part in parts]),
    )


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """True for arrays of one type with the same bits: NaN is equal to itself, 0 is not −0."""
    return a.shape == b.shape and np.array_equal(_bits(a), _bits(b))


def _bits(x: np.ndarray) -> np.ndarray:
    whole = np.ascontiguousarray(x).reshape(-1)
    return whole.view(np.uint64 if x.nbytes % 8 == 0 else np.uint8)
