"""The JAX backend of AReaL-X (areal_x.protocols.backends.Backend)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_jax.preflight import check, differentiate
from areal_x_jax.processes import join
from areal_x_jax.program_cache import prune
from areal_x_jax.shares import divide

__all__ = [
    "DEVICES_EACH",
    "TRANSPORTS",
    "check",
    "create_bank",
    "create_trainer",
    "differentiate",
    "divide",
    "join",
]

# Compiled functions take them as arguments.
jax.tree_util.register_dataclass(Batch)
jax.tree_util.register_dataclass(Policy)

TRANSPORTS: tuple[str, ...] = ("files", "nccl")
DEVICES_EACH: int | None = None  # all devices of its host


if TYPE_CHECKING:  # mypy checks that the contract is fulfilled
    import areal_x_jax
    from areal_x.protocols import adapter_bank, backends, sampler, shares, trainer
    from areal_x_jax.bank import Bank
    from areal_x_jax.sampler import Sampler
    from areal_x_jax.trainer import Trainer

    _backend: backends.Backend = areal_x_jax
    _sharing: shares.SharingBackend = areal_x_jax
    _many_adapters: adapter_bank.TrainsManyAdapters = areal_x_jax

    def _bank(own: Bank) -> adapter_bank.AdapterBank:
        return own

    def _trainer(own: Trainer) -> trainer.Trainer:
        return own

    def _sharing_trainer(own: Trainer) -> shares.SharingTrainer:
        return own

    def _measures_memory(own: Trainer) -> trainer.MeasuresMemory:
        return own

    def _keeps_logprobs(own: Trainer) -> trainer.KeepsLogprobs:
        return own

    def _keeps_entropies(own: Trainer) -> trainer.KeepsEntropies:
        return own

    def _keeps_shares(own: Trainer) -> shares.KeepsShares:
        return own

    def _sampler(own: Sampler) -> sampler.Sampler:
        return own


def create_trainer(config: TrainerConfig) -> Trainer:
    from areal_x_jax.trainer import Trainer  # with optimizers and samplers, which no check needs

    keep_compiled_programs()
    return Trainer(config)


def create_bank(config: TrainerConfig) -> Bank:
    from areal_x_jax.bank import Bank

    keep_compiled_programs()
    return Bank(config)


def keep_compiled_programs() -> None:
    """Caches compiled programs in the user's cache directory, unless another place was chosen, so
    that a second start reuses them. JAX's key of a program holds the program, JAX's and its
    compiler's versions, flags and devices: another version never finds it.
    JAX_ENABLE_COMPILATION_CACHE=0 switches the cache off."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_x" / "jax"
        prune(cache)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
