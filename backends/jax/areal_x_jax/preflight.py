"""Finds what constructing the trainer would refuse, without reading weights."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from areal_x.hf import model_dir
from areal_x.protocols.backends import Devices
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Loss, Policy, evaluate_loss
from areal_x_jax import experts, lora
from areal_x_jax.architecture import check_sharing, read_architecture
from areal_x_jax.resting import check_can_rest
from areal_x_jax.sharding import AXES, Partitioner, check_divisible, sizes_of, staged
from areal_x_jax.weights import as_stored, check_tensors


def check(config: TrainerConfig) -> Devices:
    """See `areal_x.protocols.backends.Backend`. Other processes are assumed to have as many devices
    as this one.

    Raises: UserError for a mesh that does not divide the devices or the model, and for an
    unsupported model, tensors or adapters.
    """
    own = jax.local_devices()
    if config.rests:
        check_can_rest(own[0].platform)
    sizes = sizes_of(config.mesh, len(own) * config.mesh.processes)
    mesh: Any = AbstractMesh(tuple(sizes.values()), AXES)
    directory = Path(str(config.model.path))
    arch = staged(read_architecture(model_dir.read_config(directory), config.head), config.mesh)
    experts.check_settings(config, arch.experts, directory)
    check_divisible(Partitioner(mesh), arch)
    check_sharing(config.share_prompts, directory, arch)
    lora.trained_architecture(arch, config.lora)
    if any(directory.glob("*.safetensors")):  # else they are still on the hub
        arch = as_stored(arch, directory)
        check_tensors(arch, model_dir.shapes(directory), str(directory))
    memory = (own[0].memory_stats() or {}).get("bytes_limit")
    return Devices(
        own[0].platform,
        len(own),
        memory if own[0].platform != "cpu" else None,
        images=arch.vision is not None or not arch.module,
    )


def differentiate(loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
    """See `areal_x.protocols.backends.Backend`; compiled, as an update is."""
    narrow = partial(jax.tree.map, lambda x: np.float32(x) if x.dtype == np.float64 else x)
    gradient, terms = _differentiated(loss)(narrow(policy), narrow(batch))
    return np.asarray(terms), jax.tree.map(np.asarray, gradient)


@lru_cache(64)
def _differentiated(loss: Loss) -> Any:
    def objective(policy: Policy, batch: Batch) -> tuple[jax.Array, jax.Array]:
        terms, _ = evaluate_loss(loss, policy, batch)
        return jnp.sum(batch.weights * terms), terms

    return jax.jit(jax.grad(objective, has_aux=True))
