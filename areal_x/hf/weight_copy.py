"""A copy of a trainer's weights in host memory, which is written to files while the trainer goes on.

Processes that share a model share the work: each copies and writes the tensors of its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from areal_x.hf.model_dir import in_chunks

SHARD_BYTES = 256 * 2**20  # of one file, and of the tensors that writing it may copy
Tensors = Iterable[tuple[str, np.ndarray]]


class Turns:
    """Divides tensors among `count` writers as they come: each goes to the writer with the fewest
    bytes so far, the first one of several. An instance says which are those of writer `own`, None
    for a process that writes none.

    All writers call theirs with the same sizes in the same order, and so divide them alike.
    """

    def __init__(self, own: int | None, count: int) -> None:
        self.bytes = [0] * count
        self._own = own

    def __call__(self, size: int) -> bool:
        """Counts a tensor of so many bytes. Returns True if it is this writer's."""
        turn = self.bytes.index(min(self.bytes))
        self.bytes[turn] += size
        return turn == self._own


class WeightCopy:
    """Copies of tensors. Each `take` overwrites the memory of the one before: fresh memory takes
    several times as long to fill, and there is never a second copy."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def take(self, tensors: Tensors) -> int:
        """Copies these tensors in place of the ones before, and returns their bytes."""
        before, self.tensors = self.tensors, {}
        for name, tensor in tensors:
            self.tensors[name] = copied(tensor, before.pop(name, None))
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(self.tensors.items())


def copied(tensor: np.ndarray, into: np.ndarray | None) -> np.ndarray:
    """Returns a contiguous copy of a tensor. into: memory to use if it fits."""
    if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        into = np.empty(tensor.shape, tensor.dtype)
    if tensor.dtype.name == "bfloat16":  # ml_dtypes' type, which numpy copies number by number
        np.copyto(into.view(np.uint16), tensor.view(np.uint16))
    else:
        np.copyto(into, tensor)
    return into


def write_shards(
    folder: Path, weights: Tensors, shard_bytes: int = SHARD_BYTES, writer: int = 0
) -> dict[str, int]:
    """Writes the tensors in files of at most so many bytes, or of one tensor; one shard is in memory
    at a time. Returns the size of each file by its name. writer: begins the names, as several write
    into one folder."""
    from safetensors.numpy import save_file

    sizes: dict[str, int] = {}
    for number, shard in enumerate(in_chunks(weights, shard_bytes)):
        file = folder / f"{writer:05d}-{number:05d}.safetensors"
        save_file(shard, file)
        sizes[file.name] = file.stat().st_size
    return sizes
