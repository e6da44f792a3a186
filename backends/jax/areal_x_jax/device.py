"""What depends on the kind of device: how much is held on it at once, and the precision of products."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

# Activations saved for the backward pass where the memory of a device is unknown, as on a CPU.
SAVED_BYTES = 4 * 2**30
# Logits at once where the memory is unknown: 64 MiB, and the backward pass has two such arrays.
LOGITS = 2**24
# Bytes of a device's memory for each logit of a block.
BYTES_PER_LOGIT = 256


def compute_in_fp32(platform: str) -> None:
    """Makes products of fp32 arrays those of fp32 numbers: by default an accelerator's are of ten
    (tf32) or seven (bf16) bits. A precision that the user has set stays."""
    if platform != "cpu" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes that JAX may take of a device's memory; None if unknown, as for a CPU."""
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def room_for_activations(memory: int | None, state: Any, dtype: DTypeLike) -> int:
    """Returns how many bytes a backward pass may save on each device: half of what parameters,
    moments, gradients and their copies in the compute precision leave. state: parameters, moments
    and frozen parameters, as they are on the devices."""
    if memory is None:
        return SAVED_BYTES
    params, *rest = state
    size = jnp.dtype(dtype).itemsize
    # A step has two gradients at a time, the sum and a micro-batch's own, and a cast copy of all.
    taken = sum(2 * _bytes(x) + size * _own(x) for x in jax.tree.leaves(params))
    taken += sum(_bytes(x) for x in jax.tree.leaves((params, rest)))
    return max(memory - taken, 0) // 2


def _own(x: jax.Array) -> int:
    """Numbers of an array on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))


def _bytes(x: jax.Array) -> int:
    return _own(x) * x.dtype.itemsize


def logits_at_once(memory: int | None) -> int:
    """Returns how many logits one device computes at a time."""
    return LOGITS if memory is None else max(LOGITS, memory // BYTES_PER_LOGIT)
