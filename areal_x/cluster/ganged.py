"""A trainer whose parts are in the processes of a gang, and its sampler, seen by the driver as one
object (areal_x.protocols)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from areal_x.cluster.dealing import Dealer
from areal_x.cluster.gang import Gang, PerNode
from areal_x.cluster.rank import Built, mark_of, outcome_of
from areal_x.protocols.sampler import Decoded, Sampler, SlotRequest
from areal_x.protocols.shares import Division, StepOutput
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.protocols.trainer import Mine, Wait
from areal_x.runtime.timeline import Interval
from areal_x.types import Batch, Loss

RANK = "rank"  # the name of a process, in messages, logs and the timeline


class GangTrainer:
    """A trainer of the gang. built: what the first process says of it. dealer: of its batches.
    loss: the one that `update` is called with, which every process has."""

    def __init__(
        self, gang: Gang, name: str, built: Built, dealer: Dealer, loss: Loss | None
    ) -> None:
        self.version = built.version
        self._threads, self._keeps = built.threads, built.keeps
        self._gang, self._name, self._dealer, self._loss = gang, name, dealer, loss
        # of the last update: the shape of its rows, and their division
        self._updated: tuple[tuple[int, ...], Division | None] | None = None
        self._writers: dict[Path, list[int]] = {}  # of a folder, the processes that see it

    @property
    def threads(self) -> int | None:
        return self._threads

    @threads.setter
    def threads(self, count: int | None) -> None:
        self._gang.call("set_threads", self._name, count)
        self._threads = count

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._outputs("logprobs", batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._outputs("values", batch)

    def _outputs(self, method: str, batch: Batch) -> np.ndarray:
        dealt, division = self._dealer.deal(batch, "outputs")
        asked = "outputs", self._name, method, self._dealer.speakers
        spoken = self._of_speakers(*asked, batch=dealt)
        outputs: np.ndarray = self._dealer.outputs(batch.shape, division, spoken)
        return outputs

    def _of_speakers(
        self, method: str, *arguments: Any, batch: PerNode | None = None
    ) -> list[np.ndarray | None]:
        """Returns what the processes, or at least all speakers, return of a call."""
        if self._dealer.speakers == [0]:
            return [self._gang.call(method, *arguments, batch=batch)]
        return self._gang.gather(method, *arguments, batch=batch)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if loss is not self._loss:
            raise ValueError(f"the processes have one loss for the {self._name}; this is another")
        dealt, division = self._dealer.deal(batch, "update")
        row: dict[str, float]
        row, differ = self._gang.measured("update", self._name, batch=dealt)
        self._updated = batch.shape, division
        self.version += 1
        return row | differ

    def step_logprobs(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._kept("logprobs")

    def step_entropies(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._kept("entropies")

    def _kept(self, output: StepOutput) -> np.ndarray | None:
        if self._updated is None or output not in self._keeps:
            return None
        shape, division = self._updated
        asked = "step_output", self._name, output, self._dealer.speakers, division is not None
        outputs: np.ndarray = self._dealer.outputs(shape, division, self._of_speakers(*asked))
        return outputs

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in self._gang.stream("tensors", self._name, "weights"):
            if mine is None or mine(tensor.nbytes):
                yield name, tensor

    def copy_weights(self, folder: Path) -> int | None:
        if folder not in self._writers:
            self._writers = {folder: self._find_writers(folder)}
        if not (writers := self._writers[folder]):
            return None
        size: int = self._gang.gather("copy_weights", self._name, writers)[0]  # all have copied
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
        # All have begun when it returns: `end_save` runs beside their other calls.
        under_way = self._gang.gather("begin_save", self._name, directory.absolute())[0]
        return (lambda: self._gang.beside("end_save")) if under_way else None

    def restore(self, directory: Path) -> None:
        self.version = self._gang.call("restore", self._name, directory.absolute())

    def snapshot(self) -> Any:
        self._gang.call("take_snapshot", self._name)

    def calls(self) -> list[tuple[str, Interval]]:
        """Returns the calls of all processes that have ended since the last time, for the run's
        timeline."""
        here = time.perf_counter() - time.time()
        return [
            (
                f"{RANK} {rank}",
                Interval(span.method, span.began + here, span.began + span.seconds + here, {}),
            )
            for rank, span in self._gang.spans()
        ]

    def sampler(self, slots: int, context: int, speculation: Speculation = NOTHING) -> Sampler:
        return GangSampler(self._gang, self._name, slots, context, speculation)


class GangSampler:
    """The sampler of the gang's first process (areal_x.protocols.sampler.Sampler). What needs no
    answer travels with the next call that does."""

    def __init__(
        self, gang: Gang, name: str, slots: int, context: int, speculation: Speculation
    ) -> None:
        self._gang = gang
        self._before: list[tuple[str, Any]] = []
        self.slots, self.context, self.supports_images = gang.first(
            "make_sampler", name, slots, context, speculation
        )

    def load(self, snapshot: Any) -> None:
        self._gang.first("load", self._take())

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        self._before.append(("fill", list(requests)))

    def free(self, slots: Sequence[int]) -> None:
        self._before.append(("free", list(slots)))

    def decode(self, steps: int, until_free: int) -> Decoded:
        found: Decoded = self._gang.first("decode", self._take(), steps, until_free)
        return found

    def _take(self) -> list[tuple[str, Any]]:
        taken, self._before = self._before, []
        return taken
