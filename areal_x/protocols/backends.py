"""Backends: installed packages that build trainers, found through the entry-point group
`areal_x.backends`.

An entry point names a module (or any object) with everything that `Backend` declares. A third party
adds a backend without a change to this package; `areal_x.testing.conformance` tests it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

import numpy as np

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.runtime.interrupts import raise_if_interrupted
from areal_x.types import Batch, Loss, Policy

GROUP = "areal_x.backends"


@dataclass(frozen=True)
class Devices:
    """The devices that a backend found."""

    kind: str
    """"cpu", "gpu", "cuda", "tpu" …"""

    count: int
    """Number of devices."""

    memory: int | None = None
    """Bytes of one device; None if unknown."""

    images: bool = True
    """False if the backend trains this model, which reads images, on text alone."""


class Backend(Protocol):
    """The contract of the module (or object) behind a backend's entry point."""

    TRANSPORTS: tuple[str, ...]
    """Values of vllm.transport that its trainers support; ("files",) needs no more than
    `Trainer.weights`, all others need `Trainer.device_weights`."""

    DEVICES_EACH: int | None
    """Devices that one process computes on; None is all that it sees."""

    def create_trainer(self, config: TrainerConfig) -> Trainer:
        """Builds the trainer. Raises: ConfigError for what the backend cannot do, naming the field
        and what would work."""
        ...

    def check(self, config: TrainerConfig) -> Devices:
        """Raises what the construction of this trainer would, without loading weights, for a
        config whose model.path is a directory with at least config.json."""
        ...

    def differentiate(self, loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
        """Returns a loss's terms and the gradient of `sum(batch.weights * terms)` with respect to
        each array of `policy`, computed as `update` does, from and to numpy arrays.

        Raises: what the loss raises; UserError as `areal_x.types.evaluate_loss`.
        """
        ...

    def join(self, processes: int) -> None:
        """Joins the group of processes that train one model together, before the first access to a
        device. The variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT describe it, as torchrun sets them.

        Raises: ConfigError naming mesh.processes if the backend trains in one process only,
        UserError if the processes do not find each other.
        """
        ...


DECLARED = ("TRANSPORTS", "DEVICES_EACH", "create_trainer", "check", "differentiate", "join")


def create_trainer(backend: str, config: TrainerConfig) -> Trainer:
    """Returns the trainer of an installed backend ("jax", "torch", or a third party's).

    Raises: ConfigError listing the installed backends if `backend` is not one of them.
    """
    raise_if_interrupted()
    trainer = load_backend(backend).create_trainer(config)
    raise_if_interrupted()
    return trainer


def load_backend(backend: str) -> Backend:
    """Imports a backend.

    Raises: ConfigError as `find_backend`; UserError if its entry point lacks a declared name.
    """
    entry_point = find_backend(backend)
    loaded = entry_point.load()
    missing = [name for name in DECLARED if not hasattr(loaded, name)]
    if missing:
        raise UserError(
            f"the backend {backend!r} ({entry_point.value}) lacks {', '.join(missing)}: see"
            " areal_x.protocols.backends.Backend"
        )
    return cast(Backend, loaded)


def find_backend(backend: str) -> EntryPoint:
    """Returns the backend's entry point, without importing the backend.

    Raises: ConfigError listing the installed backends if `backend` is not one of them.
    """
    installed = {e.name: e for e in entry_points(group=GROUP)}
    if backend not in installed:
        known = {"jax": "pip install areal-x-jax", "torch": "pip install areal-x-torch"}
        hint = f" ({known[backend]} adds it)" if backend in known else ""
        names = ", ".join(sorted(installed)) or "none"
        raise ConfigError("train.backend", backend, f"one of the installed backends: {names}{hint}")
    return installed[backend]
