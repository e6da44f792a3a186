"""Where the trainer computes, and in which precision."""

from __future__ import annotations

import torch

from areal_x.errors import ConfigError
from areal_x.trainer import MeshConfig


def find_device() -> torch.device:
    """The accelerator that torch finds (CUDA, NPU, XPU, MPS …), else the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator(), torch.accelerator.current_device_index())
    return torch.device("cpu")


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of activations for `trainer.precision`: "auto" is float32 on a CPU, else bfloat16."""
    if precision == "auto":
        precision = "fp32" if device.type == "cpu" else "bf16"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def check_mesh(mesh: MeshConfig) -> None:
    """Raises ConfigError for more devices than this backend trains on."""
    if mesh.data not in (-1, 1):
        raise ConfigError("mesh.data", mesh.data, "1 or -1, as the torch backend trains on one device")
    for axis in ("fsdp", "expert", "context", "tensor"):
        if getattr(mesh, axis) != 1:
            raise ConfigError(f"mesh.{axis}", getattr(mesh, axis), "1, as the torch backend trains on one device")
