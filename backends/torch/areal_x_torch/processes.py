"""The processes of `torch.distributed`, one per device: joining or starting them."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from areal_x.cluster.links import end_now, ended_by
from areal_x.errors import ConfigError, UserError
from areal_x.runtime import background

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PARENT = "AREAL_X_PARENT"  # the process id of the process 0 that started this one
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Processes:
    """An `areal_x.cluster.links.ProcessGroup`."""

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        told = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            told = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(told, 0)
        return told.numpy().tobytes()


def join(processes: int) -> Processes:
    """Joins a group of processes: those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    describe, as torchrun sets them; without these variables it starts the others itself, on this
    machine, with this process's command. LOCAL_RANK chooses the device.

    Raises: ConfigError for more processes than this machine has devices, UserError if only some
    variables are set or the processes do not arrive.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if len(missing) == len(VARIABLES):
        start_others(processes)
    elif missing:
        raise UserError(
            f"{', '.join(missing)} is not set: start every one of the {processes} processes with"
            " torchrun"
        )
    end_with_parent()
    backends = choose_device()
    try:
        dist.init_process_group(backends)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"the processes of mesh.processes = {processes} did not meet at {where} ({reason})"
        ) from error
    return Processes(dist.get_rank(), dist.get_world_size())


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


def start_others(processes: int) -> None:
    """Starts this process's command for every other rank, and makes this one rank 0. They exit with
    it, and it with them."""
    if torch.accelerator.is_available() and processes > (found := torch.accelerator.device_count()):
        raise ConfigError(
            "mesh.processes", processes, f"at most {found}, one for each device of this machine"
        )
    if getattr(sys.modules["__main__"], "__file__", None) is None:
        raise UserError(
            f"mesh.processes = {processes} cannot be started from a notebook: write the run as a"
            " gin file and start it with python -m areal_x.train"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= shared | {"RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, *sys.orig_argv[1:]]
    for rank in range(1, processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())}
        # In a session of its own: Ctrl-C goes to process 0, which notifies the others.
        child = subprocess.Popen(
            command, env=os.environ | own, stdin=subprocess.DEVNULL, start_new_session=True
        )
        atexit.register(child.kill)
        what = f"the watch over process {rank}"
        background.thread(
            end_with_child, rank, child, what=what, failed=ended_by, name=f"child-{rank}"
        )


def end_with_child(rank: int, child: subprocess.Popen[bytes]) -> None:
    """Exits if a child dies before all have joined, which nothing else would notice."""
    code = child.wait()
    if code and not dist.is_initialized():
        end_now(
            f"process {rank} ended with status {code} before the run began: its own output says why"
        )


def end_with_parent() -> None:
    """Exits when the process that started this one is gone, whatever this one waits for."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_SECONDS)
        end_now("process 0 is gone")

    background.thread(watch, what="the watch over process 0", failed=ended_by, name="parent")
