"""The PyTorch backend of AReaL-X (areal_x.protocols.backends.Backend).

The transports "nccl", "hccl", "rdt" and "handles", Ascend NPUs and flash-attn are experimental:
tested against stand-ins only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    import areal_x_torch
    from areal_x.protocols import adapter_bank, backends, sampler, shares, trainer
    from areal_x.protocols.backends import Devices
    from areal_x.protocols.shares import Division, Purpose
    from areal_x.protocols.trainer_config import TrainerConfig
    from areal_x.types import Batch, Loss, Policy
    from areal_x_torch.bank import Bank
    from areal_x_torch.sampler import Sampler
    from areal_x_torch.trainer import Trainer

    # mypy checks that the contract is fulfilled.
    _backend: backends.Backend = areal_x_torch
    _sharing: shares.SharingBackend = areal_x_torch
    _many_adapters: adapter_bank.TrainsManyAdapters = areal_x_torch

    def _bank(own: Bank) -> adapter_bank.AdapterBank:
        return own

    def _trainer(own: Trainer) -> trainer.Trainer:
        return own

    def _sharing_trainer(own: Trainer) -> shares.SharingTrainer:
        return own

    def _measures_memory(own: Trainer) -> trainer.MeasuresMemory:
        return own

    def _keeps_logprobs(own: Trainer) -> trainer.KeepsLogprobs:
        return own

    def _keeps_entropies(own: Trainer) -> trainer.KeepsEntropies:
        return own

    def _keeps_shares(own: Trainer) -> shares.KeepsShares:
        return own

    def _sampler(own: Sampler) -> sampler.Sampler:
        return own


# Values of vllm.transport; all but files need `Trainer.device_weights` and are experimental.
TRANSPORTS: tuple[str, ...] = ("files", "nccl", "hccl", "rdt", "handles")
DEVICES_EACH: int | None = 1


def create_trainer(config: TrainerConfig) -> Trainer:
    from areal_x_torch.npu_releases import check_releases

    check_releases()
    from areal_x_torch.trainer import Trainer

    return Trainer(config)


def create_bank(config: TrainerConfig) -> Bank:
    from areal_x_torch.npu_releases import check_releases

    check_releases()
    from areal_x_torch.bank import Bank

    return Bank(config)


def check(config: TrainerConfig) -> Devices:
    from areal_x_torch.npu_releases import check_releases

    check_releases()
    from areal_x_torch import preflight as of_torch

    return of_torch.check(config)


def differentiate(loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
    from areal_x_torch import preflight as of_torch

    return of_torch.differentiate(loss, policy, batch)


def join(processes: int) -> None:
    from areal_x_torch import processes as of_torch

    return of_torch.join(processes)


def divide(config: TrainerConfig, batch: Batch, count: int, purpose: Purpose) -> Division:
    from areal_x_torch import shares as of_torch

    return of_torch.divide(config, batch, count, purpose)
