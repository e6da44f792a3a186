"""The processes of `torch.distributed`, one per device."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_x.errors import UserError
from areal_x_torch.interfaces import interface_towards

INTERFACE = "GLOO_SOCKET_IFNAME"
SECONDS_TO_MEET = timedelta(minutes=30)  # torch's own default


def join(processes: int) -> None:
    """Joins the group of processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.
    LOCAL_RANK chooses the device.

    Raises: UserError if the processes do not arrive.
    """
    backends = choose_device()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # gloo listens where this host's own name leads, which may be an address that the others cannot
    # reach, or one that more than they can.
    if INTERFACE not in os.environ and (name := interface_towards(address)):
        os.environ[INTERFACE] = name
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = meet(address, port, rank, size)
        dist.init_process_group(backends, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"{address}:{port}"
        raise UserError(
            f"the processes of mesh.processes = {processes} did not meet at {where} ({reason})"
        ) from error


def meet(address: str, port: int, rank: int, size: int) -> dist.Store:
    """Returns the store through which the processes find each other. The first one serves it, on
    this address alone: torch's default is every interface of the machine.

    Raises: RuntimeError or OSError if they do not arrive.
    """
    return dist.TCPStore(
        address,
        port,
        size,
        is_master=rank == 0,
        timeout=SECONDS_TO_MEET,
        master_listen_fd=listener(address, port) if rank == 0 else None,
    )


def listener(address: str, port: int) -> int:
    """Returns the descriptor of a socket that listens there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen()
        return bound.detach()


def choose_device() -> str:
    """Selects the device of LOCAL_RANK and returns the backends of the process group, gloo for the
    host."""
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if not torch.accelerator.is_available():
        if "OMP_NUM_THREADS" not in os.environ:  # otherwise each process would use all cores
            beside = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
            torch.set_num_threads(max(1, torch.get_num_threads() // beside))
        return "gloo"
    torch.accelerator.set_device_index(local % torch.accelerator.device_count())
    return backends_of(torch.accelerator.current_accelerator())


def backends_of(device: torch.device) -> str:
    """Returns the communication backends for tensors on the host and on a device."""
    return (
        "gloo"
        if device.type == "cpu"
        else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    )


def join_alone(device: torch.device) -> None:
    """Makes this process the only one of a group, for code that needs a mesh."""
    if not dist.is_initialized():
        dist.init_process_group(backends_of(device), store=dist.HashStore(), rank=0, world_size=1)
