"""The contract of a bank: many adapters beside one frozen model, which train at once.

Rows of several adapters go through the model together. Each adapter has a rank, targets, a gradient
and AdamW's moments of its own, so that its weights are those that it would have alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.protocols.sampler import AdaptedSampler
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch

NO_ADAPTER = -1
"""In place of an adapter's index: the model alone."""

Evaluate: TypeAlias = Callable[
    [Float32[np.ndarray, "rows length"]], Float32[np.ndarray, "rows length"]
]
"""Called with the log-probabilities of a batch; returns for each the factor c of the loss
Σ -c · logp, whose gradient is added up."""


@dataclass(frozen=True)
class AdapterState:
    """An adapter outside of a bank, in fp32 under PEFT's names (areal_x.hf.adapters)."""

    tensors: Mapping[str, np.ndarray]

    moments: Mapping[str, np.ndarray] = field(default_factory=dict)
    """"exp_avg.NAME" and "exp_avg_sq.NAME" for each tensor; none for zeros."""

    steps: int = 0
    """Optimizer steps so far."""


class AdapterBank(Protocol):
    """Adapters by name, used from one thread. With each token of a batch goes the index of its
    adapter in a list of names, or NO_ADAPTER; a row has one adapter."""

    def shapes(self, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of an adapter's tensors under PEFT's names.

        Raises: UserError for targets that a bank cannot train.
        """
        ...

    def put(self, name: str, config: LoRAConfig, state: AdapterState) -> None:
        """Adds an adapter, or replaces it, without a gradient.

        Raises: UserError for tensors of another shape.
        """
        ...

    def get(self, name: str) -> AdapterState:
        """Returns an adapter's state, copied."""
        ...

    def remove(self, name: str) -> None: ...

    def nbytes(self) -> int:
        """Returns the bytes of all adapters with their gradients and moments."""
        ...

    def logprobs(
        self, batch: Batch, adapters: Int32[np.ndarray, " rows"], names: Sequence[str]
    ) -> Float32[np.ndarray, "rows length"]:
        """Returns the log-probabilities of the masked tokens, and 0 for all others."""
        ...

    def add_gradients(
        self,
        batch: Batch,
        adapters: Int32[np.ndarray, " rows"],
        names: Sequence[str],
        evaluate: Evaluate,
    ) -> Float32[np.ndarray, "rows length"]:
        """Returns the same, from one forward and one backward pass. What is added to the adapters'
        gradients counts once `settle` keeps it."""
        ...

    def settle(self, name: str, keep: bool) -> None:
        """Adds to an adapter's gradient what was computed since the last time, or discards it."""
        ...

    def step(self, name: str, optimizer: OptimizerConfig) -> dict[str, float]:
        """Takes a step of AdamW, with decay of matrices only, on an adapter's gradient, which is gone
        afterwards; returns grad_norm (before clipping), learning_rate and skipped.

        A step whose gradient's norm is not finite changes nothing and returns skipped = 1.
        """
        ...

    def snapshot(self) -> Any:
        """See `areal_x.protocols.trainer.Trainer.snapshot`; without adapters."""
        ...

    def adapter(self, name: str) -> Any:
        """Returns a copy of an adapter for `AdaptedSampler.put_adapter`."""
        ...

    def sampler(self, slots: int, context: int, exact: bool) -> AdaptedSampler:
        """See `areal_x.protocols.trainer.Trainer.sampler`. exact: what is sampled for a sequence, with
        its log-probabilities, does not depend on other sequences and adapters, bit for bit."""
        ...


@runtime_checkable
class TrainsManyAdapters(Protocol):
    """A backend with a bank."""

    def create_bank(self, config: TrainerConfig) -> AdapterBank:
        """Builds a bank beside the model of a config, of whose `lora` the targets are those that an
        adapter may have.

        Raises: NotImplementedError for a config that only `create_trainer` supports; ConfigError.
        """
        ...
