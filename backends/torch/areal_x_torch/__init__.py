"""The PyTorch backend of AReaL-X; its entry point offers `create_trainer`, `check`,
`differentiate`, `join`, `TRANSPORTS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from areal_x.protocols.loss import Loss
    from areal_x.trainer import Devices, TrainerConfig
    from areal_x.types import Batch, Policy
    from areal_x_torch.processes import Processes
    from areal_x_torch.trainer import Trainer

# of vllm.transport: for the latter two a trainer has `device_weights`
TRANSPORTS = ("files", "nccl", "handles")


def create_trainer(config: TrainerConfig) -> Trainer:
    from areal_x_torch.trainer import Trainer

    return Trainer(config)


def check(config: TrainerConfig) -> Devices:
    from areal_x_torch import checks as of_torch

    return of_torch.check(config)


def differentiate(loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
    from areal_x_torch import checks as of_torch

    return of_torch.differentiate(loss, policy, batch)


def join(processes: int) -> Processes:
    from areal_x_torch import processes as of_torch

    return of_torch.join(processes)
