"""Where the trainer computes, and in which precision."""

from __future__ import annotations

import torch

from areal_x.errors import ConfigError
from areal_x.trainer import MeshConfig


def find_device() -> torch.device:
    """The accelerator that torch finds (CUDA, NPU, XPU, MPS …), else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of activations for `trainer.precision`: "auto" is float32 on a CPU, else bfloat16."""
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else "bf16"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def tokens_at_once(asked: int, device: torch.device) -> int:
    """How many tokens of a batch to compute at once, of the `asked` that memory is said to hold.

    All on an accelerator, whose launches cost more than reading the weights again.
    """
    return min(asked, 1024) if device.type == "cpu" else asked


def check_mesh(mesh: MeshConfig) -> None:
    """Raises ConfigError for more devices than this backend trains on."""
    if mesh.data not in (-1, 1):
        raise ConfigError("mesh.data", mesh.data, "1 or -1, as the torch backend trains on one device")
    for axis in ("fsdp", "expert", "context", "tensor"):
        if getattr(mesh, axis) != 1:
            raise ConfigError(f"mesh.{axis}", getattr(mesh, axis), "1, as the torch backend trains on one device")
