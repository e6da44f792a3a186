"""The processes of `jax.distributed`: how this one joins them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_x.errors import ConfigError, UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BROADCAST_BYTES = 4096  # a collective needs one shape


@dataclass(frozen=True)
class Processes:
    """An `areal_x.cluster.links.ProcessGroup`."""

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes:
        padded = np.frombuffer(data.ljust(BROADCAST_BYTES, b"\0"), np.uint8)
        return bytes(multihost_utils.broadcast_one_to_all(padded)).rstrip(b"\0")


def join(processes: int) -> Processes:
    """Joins so many processes: those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell of,
    else those that JAX finds (on SLURM, Kubernetes, Open MPI and TPU pods). It must come before the
    first look at a device.

    Raises: UserError where they are not found or do not come, ConfigError where they are more or
    fewer.
    """
    # Else who leaves after an error waits at a barrier, minutes long, for those who are gone.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**told(os.environ))
    except Exception as error:
        wanted = (
            f"start every one of the {processes} with {', '.join(VARIABLES)}, or all at once with"
            " SLURM"
        )
        raise UserError(
            f"the processes of mesh.processes = {processes} did not find each other"
            f" ({_short(error)}): {wanted}"
        ) from error
    if jax.process_count() != processes:
        raise ConfigError(
            "mesh.processes", processes, f"{jax.process_count()}, as many processes as were started"
        )
    return Processes(jax.process_index(), processes)


def told(environment: os._Environ[str] | dict[str, str]) -> dict[str, object]:
    """What jax.distributed.initialize is told: nothing where it is to find out by itself."""
    if any(name not in environment for name in VARIABLES):
        return {}
    port = int(environment["MASTER_PORT"])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at its own
    return {
        "coordinator_address": f"{environment['MASTER_ADDR']}:{port}",
        "num_processes": int(environment["WORLD_SIZE"]),
        "process_id": int(environment["RANK"]),
        "cluster_detection_method": "deactivate",
    }


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
