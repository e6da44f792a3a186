"""The PyTorch backend of AReaL-X: `create_trainer` and `join` are what its entry point offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_x.trainer import TrainerConfig
    from areal_x_torch.processes import Processes
    from areal_x_torch.trainer import Trainer


def create_trainer(config: TrainerConfig) -> Trainer:
    from areal_x_torch.trainer import Trainer

    return Trainer(config)


def join(processes: int) -> Processes:
    from areal_x_torch import processes as of_torch

    return of_torch.join(processes)
