"""One process of the gang that trains: it holds its part of every trainer, and makes the calls that
the driver asks all processes to make.

Every call of a trainer that spans processes is collective: all make it, in one order, and compute
and gather together. The first process returns the result; of a batch's outputs each returns its
rows.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x.cluster.dealing import Parts
from areal_x.cluster.sent_batch import SentBatch, arrived
from areal_x.hf.model_dir import exhaust
from areal_x.hf.weight_copy import Turns, WeightCopy, write_shards
from areal_x.protocols.backends import create_trainer, load_backend
from areal_x.protocols.sampler import Decoded, Sampler
from areal_x.protocols.shares import KeepsShares, Shares, SharingTrainer, StepOutput
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer import (
    KeepsEntropies,
    KeepsLogprobs,
    MeasuresMemory,
    Trainer,
    Wait,
)
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Loss

PORTS = range(20_000, 32_000)  # Linux takes those of outgoing connections from 32,768 on


@dataclass(frozen=True)
class RankSpec:
    """The trainers that every process of a gang builds."""

    backend: str

    size: int
    """Number of processes."""

    configs: Mapping[str, TrainerConfig]
    """The trainers, by name."""

    losses: Mapping[str, Loss]
    """The loss of each trainer that is updated."""

    bindings: str
    """gin's, which a loss that is a configurable reads when it is called."""


@dataclass(frozen=True)
class Built:
    """What the driver knows of a trainer that a process has built."""

    version: int

    shares: Shares | None
    """Which rows of a batch the process reads; None if all."""

    threads: int | None
    """The trainer's `threads`."""

    keeps: tuple[StepOutput, ...] = ()
    """What it keeps of a step's own forward pass."""


def mark_of(folder: Path, rank: int) -> Path:
    """Returns the file by which the driver sees that a process can write to a folder."""
    return folder / f"rank-{rank}"


def outcome_of(folder: Path, rank: int) -> Path:
    """Returns the file in which a process lists the weights that it wrote, or its error."""
    return folder / f"rank-{rank}.json"


STEP_OUTPUTS: dict[StepOutput, str] = {
    "logprobs": "step_logprobs",
    "entropies": "step_entropies",
}


def kept_by(trainer: Trainer, config: TrainerConfig) -> tuple[StepOutput, ...]:
    """Returns what a trainer keeps of each step."""
    if config.head != "policy":
        return ()
    shared = isinstance(trainer, SharingTrainer) and not trainer.shares.is_all
    if shared and not isinstance(trainer, KeepsShares):
        return ()
    keeps: list[StepOutput] = ["logprobs"] if isinstance(trainer, KeepsLogprobs) else []
    if config.entropy and isinstance(trainer, KeepsEntropies):
        keeps.append("entropies")
    return tuple(keeps)


class Rank:
    """A process of the gang. rank: its number, from 0."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        self.rank = rank
        self._spec = spec
        self._trainers: dict[str, Trainer] = {}
        self._waits: list[Wait] = []
        self._sampler: Sampler | None = None
        self._snapshot: Any = None
        self._copy = WeightCopy()

    def meeting_place(self, address: str) -> tuple[str, int]:
        """Returns this node's address with a port that is free there, and that the system gives to
        no outgoing connection before this process listens on it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        while True:
            port = PORTS.start + secrets.randbelow(len(PORTS))
            with socket.socket(family) as probe:
                try:
                    probe.bind((address, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # no other port would do
                        raise
                else:
                    return address, port

    def join(self, address: str, port: int, local_rank: int, beside: int) -> None:
        """Joins the others at the first one's address. local_rank: its number among those on its
        node. beside: how many they are."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self._spec.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(beside),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        gin.parse_config(self._spec.bindings, skip_unknown=True)
        if self._spec.size > 1:
            load_backend(self._spec.backend).join(self._spec.size)

    def build(self) -> dict[str, Built]:
        """Builds the trainers and returns what they are, by name."""
        for name, config in self._spec.configs.items():
            self._trainers[name] = create_trainer(self._spec.backend, config)
        return {
            name: Built(
                trainer.version,
                trainer.shares if isinstance(trainer, SharingTrainer) else None,
                trainer.threads,
                kept_by(trainer, self._spec.configs[name]),
            )
            for name, trainer in self._trainers.items()
        }

    # ---- calls that all make

    def update(self, name: str, batch: Batch | SentBatch | Parts) -> dict[str, float]:
        trainer, loss = self._trainers[name], self._spec.losses[name]
        if isinstance(batch, Batch | SentBatch):
            return trainer.update(arrived(batch), loss)
        assert isinstance(trainer, SharingTrainer)
        part = batch[trainer.shares.own]
        return trainer.update_share(arrived(part.rows), part.whole, loss)

    def outputs(
        self,
        name: str,
        method: str,
        speakers: Sequence[int],
        batch: Batch | SentBatch | Parts,
    ) -> np.ndarray | None:
        """Returns logprobs or values, of its own rows if it is given parts; None in processes that
        are no speakers, as others return the same."""
        trainer = self._trainers[name]
        found: np.ndarray
        if isinstance(batch, Batch | SentBatch):
            found = getattr(trainer, method)(arrived(batch))
        else:
            assert isinstance(trainer, SharingTrainer)
            part = batch[trainer.shares.own]
            found = trainer.outputs_share(method, arrived(part.rows), part.whole)
        return found if self.rank in speakers else None

    def step_output(
        self, name: str, output: StepOutput, speakers: Sequence[int], shared: bool
    ) -> np.ndarray | None:
        """Returns what the last update kept, of the rows that this process was given then; None in
        processes that are no speakers. shared: that these were parts."""
        trainer = self._trainers[name]
        found: np.ndarray | None
        if shared:
            assert isinstance(trainer, KeepsShares)
            found = trainer.step_share(output)
        else:
            found = getattr(trainer, STEP_OUTPUTS[output])()
        return found if self.rank in speakers else None

    def tensors(self, name: str, method: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yields weights or adapter in the first process; the others help to gather them."""
        tensors = getattr(self._trainers[name], method)()
        if self.rank == 0:
            yield from tensors
        else:
            exhaust(tensors)

    def set_threads(self, name: str, count: int) -> None:
        """Sets the threads of the calls that all make, which one thread of this process runs."""
        self._trainers[name].threads = count

    def save(self, name: str, directory: Path | None) -> None:
        self._trainers[name].save(directory if self.rank == 0 else None)

    def begin_save(self, name: str, directory: Path) -> bool:
        """Returns True if `end_save` has something to wait for."""
        wait = self._trainers[name].save_in_background(directory)
        if wait is not None:
            self._waits.append(wait)
        return wait is not None

    def end_save(self) -> None:
        while self._waits:
            self._waits.pop()()

    def restore(self, name: str, directory: Path) -> int:
        self._trainers[name].restore(directory)
        return self._trainers[name].version

    def take_snapshot(self, name: str) -> None:
        """Takes a snapshot together; the first process keeps it for its sampler."""
        found = self._trainers[name].snapshot()
        self._snapshot = found if self.rank == 0 else None

    # ---- weights for servers

    def mark(self, folder: Path) -> None:
        """Shows the driver that this process can write to a folder."""
        with suppress(OSError):
            mark_of(folder, self.rank).touch()

    def copy_weights(self, name: str, writers: Sequence[int]) -> int:
        """Gathers the weights together, and copies those of this process's turn among the writers.
        Returns the bytes of all."""
        own = writers.index(self.rank) if self.rank in writers else None
        turns = Turns(own, len(writers))
        self._copy.take(self._trainers[name].weights(turns))
        return sum(turns.bytes)

    def write_weights(self, folder: Path, writers: Sequence[int]) -> None:
        """Writes the copied tensors, beside the calls that train, and then the file that lists its
        files for the driver, or says why they could not be written: that is no reason to lose the
        gang."""
        if self.rank not in writers:
            return
        try:
            outcome: dict[str, Any] = {"sizes": write_shards(folder, self._copy, writer=self.rank)}
        except Exception as error:
            outcome = {"error": f"{error}"}
            for file in folder.glob(f"{self.rank:05d}-*"):  # so that there is room to say so
                file.unlink(missing_ok=True)
        with suppress(OSError):
            outcome_of(folder, self.rank).write_text(json.dumps(outcome))

    def peak_bytes(self) -> int | None:
        """Returns the most bytes of one device that this process has used so far; None if it
        computes in the host's memory."""
        trainers = (x for x in self._trainers.values() if isinstance(x, MeasuresMemory))
        return max((x for x in (y.peak_bytes() for y in trainers) if x is not None), default=None)

    def apply(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self._trainers[name], self.rank, *arguments)

    # ---- the sampler, in the first process

    def make_sampler(
        self, name: str, slots: int, context: int, speculation: Speculation
    ) -> tuple[int, int, bool]:
        self._sampler = self._trainers[name].sampler(slots, context, speculation)
        return self._sampler.slots, self._sampler.context, self._sampler.supports_images

    def load(self, before: Sequence[tuple[str, Any]]) -> None:
        sampler = self._prepared(before)
        snapshot, self._snapshot = self._snapshot, None
        sampler.load(snapshot)

    def decode(self, before: Sequence[tuple[str, Any]], steps: int, until_free: int) -> Decoded:
        return self._prepared(before).decode(steps, until_free)

    def _prepared(self, before: Sequence[tuple[str, Any]]) -> Sampler:
        """Returns the sampler after these calls of `fill` and `free`."""
        assert self._sampler is not None
        for method, argument in before:
            getattr(self._sampler, method)(argument)
        return self._sampler
