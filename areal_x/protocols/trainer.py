"""The contract of a trainer: numpy in, numpy out, whatever the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from areal_x.protocols.sampler import Sampler
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.types import Batch, Loss

Wait = Callable[[], None]
"""Blocks until background work is done, and raises what went wrong in it."""

Mine = Callable[[int], bool]
"""Called with the bytes of each tensor, in the same order by every process that shares a model: True
if this process has a use for the tensor."""


def is_max_reduced(metric: str) -> bool:
    """True if a loss's metric is reduced by max over masked tokens (at least 0) instead of by mean:
    if its name, after any "/", begins with largest_."""
    return metric.rpartition("/")[2].startswith("largest_")


class Scorer(Protocol):
    """Computes log-probabilities of given tokens, which is all that a reference or a teacher does:
    a trainer or a server."""

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Returns each token's log-probability given the tokens before it in its sequence (see
        `Batch.parents`); 0 for a sequence's first token and for padding. For a trainer: under the
        current policy, with the head "policy" only."""
        ...


class Trainer(Scorer, Protocol):
    """A trainer of any backend."""

    version: int
    """Optimizer steps so far."""

    threads: int | None
    """CPU threads per operation, which the ring may set between steps (areal_x.runtime.cores); None
    if the trainer does not compute on a CPU or does not control its threads. Setting None is an
    error."""

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Returns one number per token; 0 for padding.

        With the head "value": the reward expected given the tokens before it in its sequence, 0 for
        a sequence's first token. With "reward": the score of the sequence up to and including it. The
        number is a linear function without bias of the last hidden state, Hugging Face's `score` of
        a sequence classifier with one label; 0 if the model's directory has none.
        """
        ...

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Takes exactly one optimizer step on `sum(batch.weights * terms)`, in any number of
        micro-batches; version += 1.

        A step whose loss or gradient norm is not finite changes neither weights nor moments and
        returns skipped = 1. The loss gets what the head computes: logp (with entropy and the
        divergence from a teacher if requested), or values alone.

        Returns loss, grad_norm (before clipping), learning_rate, skipped, and each metric of the
        loss as its mean over masked tokens, or as its maximum if `is_max_reduced`.
        """
        ...

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the policy's tensors under their Hugging Face names, one at a time, with adapters
        merged into them, contiguous. They may be views of the trainer's own memory, which change
        with the next step.

        mine: the tensors to yield, None for all. The others cost no copy to the host, but processes
        that share the model gather them too.
        """
        ...

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        """Yields the same tensors as `weights`, as torch tensors on the device. Only needed by the
        transports other than "files" (`Backend.TRANSPORTS`), which send no adapters.

        Raises: NotImplementedError if the backend offers neither.
        """
        ...

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the adapters' tensors under PEFT's names (with `lora.rank` above 0)."""
        ...

    def save(self, directory: Path | None) -> None:
        """Writes a Hugging Face model directory, or an adapter's in PEFT's form, that also holds
        optimizer moments and version. None writes nothing: a process that shares the model helps
        to gather it."""
        ...

    def save_in_background(self, directory: Path) -> Wait | None:
        """Starts to save the state in the form of `trainer.checkpoint` and returns once the state
        may change again. The result waits until everything is on disk; None means it already is.
        Every process that shares the model writes its own part."""
        ...

    def restore(self, directory: Path) -> None:
        """Restores the exact state that `save` wrote, with this backend or another."""
        ...

    def snapshot(self) -> Any:
        """Returns a copy of the policy on its devices, in the compute precision, for this backend's
        own sampler."""
        ...

    def sampler(self, slots: int, context: int, speculation: Speculation = NOTHING) -> Sampler:
        """Returns the backend's batched sampler for sequences of up to `context` tokens. speculation:
        which tokens it guesses ahead; a sampler that guesses none samples the same tokens.

        Raises: UserError for a model that its speculation does not support.
        """
        ...


@runtime_checkable
class KeepsLogprobs(Protocol):
    """A trainer that keeps the log-probabilities of a step's own forward pass, for those who look
    at the batch afterwards (areal_x.types.Turn)."""

    def step_logprobs(self) -> Float32[np.ndarray, "rows length"] | None:
        """Returns those of the trained tokens of the last `update`, under the parameters before it,
        and 0 for all others. Processes that share the model call it together. None if the last step
        was given shares of its rows (areal_x.protocols.shares.KeepsShares)."""
        ...


@runtime_checkable
class KeepsEntropies(Protocol):
    """A trainer that keeps the entropies of a step's own forward pass, if its loss gets them."""

    def step_entropies(self) -> Float32[np.ndarray, "rows length"] | None:
        """Returns those of the policy before the last `update` at its trained tokens, and 0 for all
        others; None if it computed none. Otherwise as `KeepsLogprobs.step_logprobs`."""
        ...


@runtime_checkable
class SetsOptimizer(Protocol):
    """A trainer whose optimizer takes other settings from step to step, as clients that step it
    themselves send them."""

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Sets the settings of the next steps; the moments stay.

        Raises: ValueError for another optimizer, or another precision of its moments.
        """
        ...


@runtime_checkable
class CopiesWeights(Protocol):
    """A trainer that copies its weights and writes the copy itself, as one does whose parts are in
    several processes. An engine does it for any other trainer."""

    def copy_weights(self, folder: Path) -> int | None:
        """Copies the weights in the place of the copy before, and returns the bytes of all. The
        trainer may change them afterwards. folder: below which they will be written; None returns
        if no process of the trainer can write there, and nothing was copied."""
        ...

    def write_weights(self, folder: Path) -> Mapping[str, int]:
        """Writes the copy to files in a folder right below that of `copy_weights`, and returns their
        sizes by their names. Called from another thread, while the trainer trains.

        Raises: OSError if they cannot be written.
        """
        ...


@runtime_checkable
class RestsOnHost(Protocol):
    """A trainer whose state can leave its devices between steps, which train.colocate needs."""

    def rest(self) -> None:
        """Moves parameters, moments and whatever else outlives a step to the host's memory, bit for
        bit, and gives the devices' memory back. Until `wake`, of the trainer's methods only those that
        save may be called. Does nothing if it rests; on a CPU the state may stay where it is.

        Raises: UserError if the devices cannot be given to another process.
        """
        ...

    def wake(self) -> None:
        """Moves everything back to where it was. Does nothing if the trainer does not rest."""
        ...

    def device_bytes(self) -> int:
        """Returns the bytes of the state that are in the memory of the devices now."""
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """A trainer that knows the memory of its devices."""

    def peak_bytes(self) -> int | None:
        """Returns the most bytes of one device that this process has used so far; None if it
        computes in the host's memory."""
        ...


@runtime_checkable
class InProcesses(Protocol):
    """A trainer whose parts are in other processes."""

    def apply(self, function: Callable[..., Any], *arguments: Any, beside: bool = False) -> Any:
        """Calls a function of a module in all processes, with the process's trainer and number and
        these arguments, and returns what the first one returns. beside: beside their other
        calls."""
        ...
