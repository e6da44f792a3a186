"""A trainer whose parts are in the processes of a gang, and its sampler, seen by the driver as one
object (areal_x.protocols)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from areal_x.cluster.gang import Gang
from areal_x.cluster.rank import mark_of, outcome_of
from areal_x.protocols.sampler import Decoded, Sampler, SlotRequest
from areal_x.protocols.trainer import Mine, Wait
from areal_x.types import Batch, Loss


class GangTrainer:
    """A trainer of the gang. version: of its weights. loss: the one that `update` is called with,
    which every process has."""

    threads: int | None = None  # each process has its own

    def __init__(self, gang: Gang, name: str, version: int, loss: Loss | None) -> None:
        self.version = version
        self._gang, self._name, self._loss = gang, name, loss
        self._writers: dict[Path, list[int]] = {}  # of a folder, the processes that see it

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._outputs("logprobs", batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._outputs("values", batch)

    def _outputs(self, method: str, batch: Batch) -> np.ndarray:
        found: np.ndarray = self._gang.call("outputs", self._name, method, batch)
        return found

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if loss is not self._loss:
            raise ValueError(f"the processes have one loss for the {self._name}; this is another")
        row: dict[str, float] = self._gang.call("update", self._name, batch)
        self.version += 1
        return row

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in self._gang.stream("tensors", self._name, "weights"):
            if mine is None or mine(tensor.nbytes):
                yield name, tensor

    def copy_weights(self, folder: Path) -> int | None:
        if folder not in self._writers:
            self._writers = {folder: self._find_writers(folder)}
        if not (writers := self._writers[folder]):
            return None
        size: int = self._gang.call("copy_weights", self._name, writers)
        return size

    def write_weights(self, folder: Path) -> dict[str, int]:
        writers = self._writers[folder.parent]
        self._gang.beside("write_weights", folder, writers)
        sizes: dict[str, int] = {}
        for rank in writers:
            file = outcome_of(folder, rank)
            outcome = json.loads(file.read_text())
            if "error" in outcome:
                raise OSError(outcome["error"])
            sizes |= outcome["sizes"]
            file.unlink()
        return sizes

    def _find_writers(self, folder: Path) -> list[int]:
        """Returns the processes whose nodes can write to a folder of this machine."""
        self._gang.beside("mark", folder)
        marks = [mark_of(folder, rank) for rank in range(len(self._gang.nodes))]
        seen = [rank for rank, mark in enumerate(marks) if mark.exists()]
        for mark in marks:
            mark.unlink(missing_ok=True)
        return seen

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        raise NotImplementedError("the processes send them")

    def apply(self, function: Callable[..., Any], *arguments: Any, beside: bool = False) -> Any:
        call = self._gang.beside if beside else self._gang.call
        return call("apply", self._name, function, *arguments)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._gang.stream("tensors", self._name, "adapter")

    def save(self, directory: Path | None) -> None:
        self._gang.call("save", self._name, directory and directory.absolute())

    def save_in_background(self, directory: Path) -> Wait | None:
        under_way = self._gang.call("begin_save", self._name, directory.absolute())
        return (lambda: self._gang.beside("end_save")) if under_way else None

    def restore(self, directory: Path) -> None:
        self.version = self._gang.call("restore", self._name, directory.absolute())

    def snapshot(self) -> Any:
        self._gang.call("take_snapshot", self._name)

    def sampler(self, slots: int, context: int) -> Sampler:
        return GangSampler(self._gang, self._name, slots, context)


class GangSampler:
    """The sampler of the gang's first process (areal_x.protocols.sampler.Sampler)."""

    def __init__(self, gang: Gang, name: str, slots: int, context: int) -> None:
        self._gang = gang
        self.slots, self.context, self.supports_images = gang.one(
            0, "make_sampler", name, slots, context
        )

    def load(self, snapshot: Any) -> None:
        self._gang.one(0, "load")

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        self._gang.one(0, "fill", list(requests))

    def decode(self, steps: int, until_free: int) -> Decoded:
        found: Decoded = self._gang.one(0, "decode", steps, until_free)
        return found

    def free(self, slots: Sequence[int]) -> None:
        self._gang.one(0, "free", list(slots))
