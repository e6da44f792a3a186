"""Joining the processes of `jax.distributed`."""

from __future__ import annotations

import os

import jax

from areal_x.errors import ConfigError, UserError


def join(processes: int) -> None:
    """Joins the group of processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.
    Must precede the first access to a device.

    Raises: UserError if they do not arrive, ConfigError if their number differs.
    """
    # Otherwise a process that exits after an error waits minutes at a barrier for those that are gone.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = os.environ["MASTER_ADDR"]
    host = f"[{address}]" if ":" in address else address  # of IPv6
    where = f"{host}:{os.environ['MASTER_PORT']}"
    try:
        jax.distributed.initialize(
            coordinator_address=where,
            # Its default is every interface of the machine.
            coordinator_bind_address=where,
            num_processes=int(os.environ["WORLD_SIZE"]),
            process_id=int(os.environ["RANK"]),
            cluster_detection_method="deactivate",
        )
    except Exception as error:
        raise UserError(
            f"the processes of mesh.processes = {processes} did not meet at {where}"
            f" ({_short(error)})"
        ) from error
    if jax.process_count() != processes:
        raise ConfigError(
            "mesh.processes", processes, f"{jax.process_count()}, as many processes as were started"
        )


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
