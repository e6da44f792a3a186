"""Log-probabilities and gradients of one model on several meshes of two devices, compared with those on one.

`python -m tests.jax.family_meshes DIRECTORY …` prints for each model and mesh the largest deviation, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_x.hf.model_dir import read_config, read_tensors
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_jax import head
from areal_x_jax.architecture import read_architecture
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import ONE_DEVICE, Partitioner, check_divisible, make_partitioner
from areal_x_jax.weights import from_tensors, to_tensors
from tests.conftest import python_with
from tests.models import sequences

AXES = ("fsdp", "tensor", "context", "expert")


def outcome(directory: Path, partitioner: Partitioner) -> dict[str, np.ndarray]:
    """Returns log-probabilities of two packed rows, and the gradient of their sum, relative to the largest of each tensor."""
    arch = read_architecture(read_config(directory))
    check_divisible(partitioner, arch)
    params = from_tensors(arch, read_tensors(directory), str(directory), partitioner)
    tokens = np.stack(sequences(16, 16, vocab=arch.vocab))
    ids, positions = np.repeat([[1, 2]], 8, axis=1).repeat(2, 0), np.tile(np.arange(8), 2)[None].repeat(2, 0)

    @jax.jit
    def loss(params: Params) -> Any:
        own = jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(ids)
        hidden, _ = hidden_states(arch, params, *own, "products", partitioner)
        hidden = partitioner.constrain(hidden, "rows", None, None)
        of_head = {"softcap": arch.logit_softcap, "partitioner": partitioner, "tied": arch.tied}
        logp, *_ = head.logprobs(hidden, head_kernel(params), own[0], own[2], 1.0, 64, **of_head)
        return jnp.sum(logp), logp

    (_, logp), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return {"logp": np.asarray(logp)} | {name: x / max(np.abs(x).max(), 1e-6) for name, x in to_tensors(arch, gradient)}


def deviations(directory: Path) -> dict[str, float]:
    alone, found = outcome(directory, ONE_DEVICE), {}
    mixed = read_architecture(read_config(directory)).experts is not None
    for axis in AXES if mixed else AXES[:-1]:
        on_mesh = outcome(directory, make_partitioner(MeshConfig(**{axis: 2})))
        found[axis] = max(float(np.abs(on_mesh[name] - x).max()) for name, x in alone.items())
    return found


def deviations_of(directories: Sequence[Path]) -> list[dict[str, float]]:
    """Returns the same for each model, from a process with two devices."""
    said = python_with(2, "-m", "tests.jax.family_meshes", *map(str, directories), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        print(json.dumps(deviations(Path(directory))), flush=True)
