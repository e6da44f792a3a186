"""Joining the processes of `jax.distributed`."""

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
    """Joins a group of processes: those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    describe, else those that JAX finds (on SLURM, Kubernetes, Open MPI and TPU pods). Must precede
    the first access to a device.

    Raises: UserError if they are not found or do not arrive, ConfigError if their number differs.
    """
    # Otherwise a process that exits after an error waits minutes at a barrier for those that are gone.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**initialize_arguments(os.environ))
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


def initialize_arguments(environment: os._Environ[str] | dict[str, str]) -> dict[str, object]:
    """Returns the arguments of jax.distributed.initialize; none if it is to detect the cluster
    itself."""
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
