"""The trainer's device and compute precision."""

from __future__ import annotations

import os

import torch

from areal_x.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Logits at once where a device's memory is unknown: 64 MiB, in up to three arrays.
LOGITS = 2**24
# Bytes of a device's memory for each logit of a block.
BYTES_PER_LOGIT = 256


def find_device() -> torch.device:
    """Returns the accelerator that torch finds (CUDA, NPU, XPU, MPS …), else the CPU. Experimental
    except for the CPU and one CUDA device: no other has been used in tests."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return (
        torch.device("cpu")
        if found is None
        else torch.device(found.type, torch.accelerator.current_device_index())
    )


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of activations for `trainer.precision`: "auto" is float32 on a CPU, else
    bfloat16."""
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else "bf16"
    return torch.float32 if precision == "fp32" else torch.bfloat16


def memory_of(device: torch.device) -> int | None:
    """Returns the bytes of an accelerator's own memory; None if unknown, as for a CPU."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def logits_at_once(memory: int | None) -> int:
    """Returns how many logits are computed at a time."""
    return LOGITS if memory is None else max(LOGITS, memory // BYTES_PER_LOGIT)


def peak_bytes(device: torch.device) -> int | None:
    """Returns the most bytes of an accelerator's own memory that this process has used so far; None
    if unknown, as for a CPU."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def make_deterministic(device: torch.device) -> None:
    """Restricts torch to kernels that give equal bits for equal operands, and makes it raise for
    operations without one.

    Raises: UserError on CUDA if the environment lets cuBLAS choose kernels by what else is running.
    """
    if device.type == "cuda" and os.environ.get(WORKSPACE) not in (":4096:8", ":16:8"):
        raise UserError(
            f"train.deterministic = True needs {WORKSPACE}=:4096:8 in the environment on this"
            " device: start with it"
        )
    torch.use_deterministic_algorithms(True)
