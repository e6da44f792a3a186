"""The trainer's contract: numpy in, numpy out, whatever the backend.

A backend is a module found through the entry-point group `areal_x.backends`; it offers `create_trainer(config)`. Configs are
plain frozen dataclasses, read the same way by every backend. What a backend cannot do it refuses at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import gin
import numpy as np
from jaxtyping import Float32

from areal_x.errors import ConfigError, one_of, positive, within
from areal_x.rollout.sampler import Sampler
from areal_x.types import Array, Batch, Policy

Loss = Callable[[Policy, Batch], tuple[Array, dict[str, Array]]]


@gin.configurable("optimizer")
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only, global-norm clipping, linear warm-up, then constant or cosine.

    schedule_steps: length of the cosine in optimizer steps, warm-up included (unused when constant).
    final_ratio: the share of `learning_rate` that the cosine ends at. clip_norm: 0 turns clipping off.
    """

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    schedule_steps: int = 0
    final_ratio: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        positive("optimizer.learning_rate", self.learning_rate)
        within("optimizer.beta1", self.beta1, 0, 1)
        within("optimizer.beta2", self.beta2, 0, 1)
        within("optimizer.final_ratio", self.final_ratio, 0, 1)
        one_of("optimizer.schedule", self.schedule, ("constant", "cosine"))
        if self.schedule == "cosine" and self.schedule_steps <= self.warmup_steps:
            raise ConfigError(
                "optimizer.schedule_steps", self.schedule_steps, f"more than the {self.warmup_steps} warm-up steps"
            )

    def learning_rate_at(self, step: Array) -> Array:
        """The learning rate of optimizer step `step` (0 is the first), written once for every backend's arrays."""
        from array_api_compat import array_namespace

        xp = array_namespace(step)
        warmup = xp.minimum((step + 1.0) / max(self.warmup_steps, 1), xp.ones_like(step))
        if self.schedule == "constant":
            return self.learning_rate * warmup
        done = (step - self.warmup_steps) / (self.schedule_steps - self.warmup_steps)
        done = xp.clip(done, 0.0, 1.0)
        cosine = 0.5 * (1.0 + xp.cos(np.pi * done))
        return self.learning_rate * warmup * (self.final_ratio + (1.0 - self.final_ratio) * cosine)


@gin.configurable("mesh")
@dataclass(frozen=True)
class MeshConfig:
    """How local devices are divided. data: copies of the model, -1 takes every device that is left."""

    data: int = -1


@gin.configurable("model")
@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained.

    path: a Hugging Face directory (config.json, safetensors, tokenizer), a hub name, or a function that makes a directory when
    the run starts and returns its name (in gin `@name`, without parentheses).
    """

    path: str | Callable[[], str] = "Qwen/Qwen2-1.5B-Instruct"


@gin.configurable("trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """Everything a backend needs to build a trainer.

    precision: "fp32", "bf16" (bf16 compute over fp32 master weights) or "auto" (fp32 on CPU, else bf16).
    micro_batch_rows: rows computed at once on one device; the rest of a batch is accumulated.
    head_chunk: positions whose logits over the vocabulary exist at once.
    temperature: what the policy is sampled at; log-probabilities are of softmax(logits / temperature).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    precision: str = "auto"
    micro_batch_rows: int = 8
    head_chunk: int = 1024
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("trainer.precision", self.precision, ("auto", "fp32", "bf16"))
        positive("trainer.micro_batch_rows", self.micro_batch_rows)
        positive("trainer.head_chunk", self.head_chunk)
        positive("trainer.temperature", self.temperature)


class Trainer(Protocol):
    """What every backend's trainer does. `version` counts its optimizer steps."""

    version: int

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        """Log-probability of each token given those before it in its segment, under the current policy; 0 for a segment's
        first token and for padding."""
        ...

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Exactly one optimizer step on `sum(batch.weights * terms)`, in any number of micro-batches; version += 1.

        Returns loss, grad_norm (before clipping), learning_rate, and each of the loss's metrics as its mean over masked tokens.
        """
        ...

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """The policy's tensors under their Hugging Face names, one at a time."""
        ...

    def save(self, directory: Path) -> None:
        """A Hugging Face model directory that also holds the optimizer's moments and the version."""
        ...

    def restore(self, directory: Path) -> None:
        """The exact state that `save` wrote, by this backend or another."""
        ...

    def snapshot(self) -> Any:
        """A copy of the policy on its devices, in the compute precision, for this backend's own sampler."""
        ...

    def sampler(self, slots: int, context: int) -> Sampler:
        """The backend's batched sampler for sequences of up to `context` tokens."""
        ...


def create_trainer(backend: str, config: TrainerConfig) -> Trainer:
    """The trainer of an installed backend ("jax", "torch", or any that a third party registers).

    Raises: ConfigError that lists the installed backends when `backend` is not one of them.
    """
    trainer: Trainer = find_backend(backend).load().create_trainer(config)
    return trainer


def find_backend(backend: str) -> Any:
    """The backend's entry point, without importing the backend."""
    installed = {e.name: e for e in entry_points(group="areal_x.backends")}
    if backend not in installed:
        known = {"jax": "pip install -e backends/jax", "torch": "pip install -e backends/torch"}
        hint = f" ({known[backend]} adds it)" if backend in known else ""
        wanted = f"one of the installed backends: {', '.join(sorted(installed)) or 'none'}{hint}"
        raise ConfigError("train.backend", backend, wanted)
    return installed[backend]
