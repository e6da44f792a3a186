"""Moves arrays between the devices and the host's memory, bit for bit.

On the host they are numpy arrays, one copy of each whatever its sharding. Resting arrays can be read
like others, by code that saves them; a step needs them back on the devices.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from areal_x.errors import UserError

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


def check_can_rest(platform: str) -> None:
    """Raises: UserError for devices whose memory this process would not give back."""
    if platform == "tpu":
        raise UserError(
            "train.colocate = True needs GPUs with JAX: a TPU belongs to one process as long as that"
            " runs, so that no server can use it too"
        )
    if platform != "cpu" and os.environ.get(ALLOCATOR) != "platform":
        raise UserError(
            f"train.colocate = True needs {ALLOCATOR}=platform in the environment with JAX on a GPU,"
            " whose other allocators keep memory that was freed: start with it"
        )


def to_host(tree: Any) -> Any:
    """Returns the arrays on the host, and frees their memory on the devices."""
    return jax.tree.map(_to_host, tree)


def _to_host(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    found = np.asarray(x)
    if all(device.platform == "cpu" for device in x.devices()):
        found = found.copy()  # a view of the device's own memory, which would keep it
    x.delete()
    return found


def to_devices(tree: Any, shardings: Any) -> Any:
    """Returns the arrays on the devices, sharded as these tell."""
    return jax.tree.map(_to_devices, tree, shardings)


def _to_devices(x: Any, sharding: Any) -> Any:
    # Not an alias of the host's memory: steps donate their arrays.
    return x if isinstance(x, jax.Array) else jax.device_put(x, sharding, may_alias=False)


def device_bytes(tree: Any) -> int:
    """Returns the bytes of the arrays on this process's devices, each copy counted."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)
