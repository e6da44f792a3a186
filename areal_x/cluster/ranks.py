"""One trainer across many processes: process 0 runs the training loop, and the others repeat its
calls on their own trainers.

    process 0                                                  process 1, 2, …
    join ◀──────────── the backend's process group ──────────▶ join
    Experiment.run: the ring                                   Experiment.follow: the same trainers, and
        DistributedTrainer.update(batch, loss) ──the batch──▶      serve: trainer.update(batch, loss)

Every call of a trainer that spans processes is collective: all processes make it, in one order, and
compute and gather together. All get the result; process 0 uses it and the others discard it, and
process 0 alone writes files. A loss cannot be sent, but each process has it: a trainer is updated
with one loss only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gin
import numpy as np
from jaxtyping import Float32

from areal_x.batching.batch import Models
from areal_x.cluster.links import Follower, Leader, described, meet
from areal_x.cluster.slurm import check_tasks, tasks
from areal_x.errors import ConfigError
from areal_x.hf.model_dir import exhaust
from areal_x.protocols.backends import load_backend
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.trainer import Trainer, Wait
from areal_x.types import Batch, Loss

# what process 0 announces before anything else
BEGINS, FINISHED = "the run begins", "the run has finished"
_joined: list[Leader | Follower] = []  # a process belongs to one group for its lifetime


def join(backend: str, processes: int) -> Leader | Follower | None:
    """Joins the other processes on the first call; returns None if there are none.

    The variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the backend's own discovery,
    tell which process this is.

    Raises: UserError for a number of processes other than were started, a backend that trains in
    one process only, Slurm tasks that the backend cannot join into one run, and processes that were
    started with different configs or do not join.
    """
    started = int(os.environ.get("WORLD_SIZE") or processes)
    if started != processes:
        raise ConfigError(
            "mesh.processes",
            processes,
            f"{started}, as many processes as were started (WORLD_SIZE = {started})",
        )
    if tasks(os.environ) > 1:
        check_tasks(os.environ, processes, backend, load_backend(backend).JOINS_BY_SLURM)
    if processes == 1:
        return None
    if not _joined:
        _joined.append(meet(load_backend(backend).join(processes), gin.config_str()))
    return _joined[0]


def announce(joined: Leader | Follower | None, what: str) -> None:
    """Announces to the other processes, if any, whether the run begins."""
    if isinstance(joined, Leader):
        joined.agree(lambda: what)


def announced(process_0: Follower) -> str:
    """Returns what process 0 announced."""
    return process_0.agree(lambda: "")


class DistributedTrainer:
    """Process 0's trainer, whose calls all other processes repeat
    (areal_x.protocols.trainer.Trainer).

    name: of the trainer, the same on every process. loss: the one that `update` is called with.
    """

    threads: int | None = None  # each process has its own

    def __init__(self, leader: Leader, name: str, trainer: Trainer, loss: Loss | None) -> None:
        self._leader, self._name, self._trainer, self._loss = leader, name, trainer, loss

    @property
    def version(self) -> int:
        return self._trainer.version

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        with self._all("logprobs", batch):
            return self._trainer.logprobs(batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        with self._all("values", batch):
            return self._trainer.values(batch)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if loss is not self._loss:
            raise ValueError(
                f"the other processes have one loss for the {self._name}, and this is another"
            )
        with self._all("update", batch):
            return self._trainer.update(batch, loss)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._gathered("weights")

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        return self._gathered("device_weights")

    def _gathered(self, method: str) -> Iterator[tuple[str, Any]]:
        with self._all(method):
            tensors = getattr(self._trainer, method)()
            try:
                for tensor in tensors:  # noqa: UP028 - `yield from` would close them where this is closed
                    yield tensor
            finally:  # the others gather all tensors, even if this process stops early
                exhaust(tensors)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        with self._all("adapter"):
            yield from list(self._trainer.adapter())  # small; complete before the others go on

    def snapshot(self) -> Any:
        with self._all("snapshot"):
            return self._trainer.snapshot()

    def save(self, directory: Path | None) -> None:
        with self._all("save"):
            self._trainer.save(directory)

    def save_in_background(self, directory: Path) -> Wait | None:
        with self._all("save_in_background", directory=str(directory.absolute())):
            return self._trainer.save_in_background(directory)

    def restore(self, directory: Path) -> None:
        with self._all("restore", directory=str(directory.absolute())):
            self._trainer.restore(directory)

    def sampler(self, slots: int, context: int) -> Sampler:
        return self._trainer.sampler(slots, context)

    def _all(self, method: str, batch: Batch | None = None, **more: str) -> Any:
        arrays = None if batch is None else arrays_of(batch)
        return self._leader.together({"trainer": self._name, "method": method, **more}, arrays)


def distribute(leader: Leader, models: Models, losses: Mapping[str, Loss]) -> Models:
    """Returns the models with each trainer made a DistributedTrainer. losses: the loss of each
    trainer, by name."""
    distributed = {
        name: DistributedTrainer(leader, name, trainer, losses.get(name))
        for name, trainer in models.trainers().items()
    }
    return replace(models, **distributed)  # type: ignore[arg-type]


def serve(follower: Follower, models: Models, losses: Mapping[str, Loss]) -> None:
    """Repeats the calls of process 0 on this process's trainers until process 0 is done."""
    trainers = models.trainers()
    writing: list[Wait] = []
    while (received := follower.receive()) is not None:
        message, arrays = received
        if "done" in message:
            break
        try:
            if message["method"] == "save_in_background":
                wait_for(writing)
            wait = run_call(
                trainers[message["trainer"]], message, arrays, losses.get(message["trainer"])
            )
            writing += [] if wait is None else [wait]
        except Exception as error:
            follower.answer(message["call"], described(error))
            raise
        follower.answer(message["call"])
    wait_for(writing)


def run_call(
    trainer: Trainer,
    message: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    loss: Loss | None,
) -> Wait | None:
    """Runs this process's part of one call of `DistributedTrainer`, and returns what waits for the
    work that it left in the background."""
    method = message["method"]
    if method == "update":
        assert loss is not None
        trainer.update(Batch(**arrays), loss)
    elif method in ("logprobs", "values"):
        getattr(trainer, method)(Batch(**arrays))
    elif method in ("weights", "device_weights", "adapter"):
        exhaust(getattr(trainer, method)())
    elif method == "save":
        trainer.save(None)
    elif method == "save_in_background":
        return trainer.save_in_background(Path(message["directory"]))
    elif method == "restore":
        trainer.restore(Path(message["directory"]))
    else:
        trainer.snapshot()
    return None


def arrays_of(batch: Batch) -> dict[str, np.ndarray]:
    return {
        f.name: np.asarray(x) for f in fields(Batch) if (x := getattr(batch, f.name)) is not None
    }


def wait_for(writing: list[Wait]) -> None:
    while writing:
        writing.pop()()
