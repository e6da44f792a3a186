"""What the trainer's construction would refuse, found without a weight of the model."""

from __future__ import annotations

from pathlib import Path

import torch

from areal_x.trainer import Devices, TrainerConfig
from areal_x_torch import attention, loading, lora, rotations
from areal_x_torch.device import compute_dtype, find_device, memory_of
from areal_x_torch.images import check_sharing
from areal_x_torch.parallel import check_model, sizes_of


def check(config: TrainerConfig) -> Devices:
    """See `areal_x.trainer.Devices`.

    Raises: UserError for a mesh that does not make up the processes or does not divide the model, for attention, adapters or
    shared prompts that it cannot have, and for a model that this backend does not compute as transformers does.
    """
    device, directory = find_device(), Path(str(config.model.path))
    if config.lora.rank:
        lora.check_targets(directory, config.lora)
    sizes_of(config.mesh)
    check_model(directory, config.mesh, None, learns=not config.lora.rank)  # None: the memory is counted elsewhere
    built = loading.build(directory, config.head).config
    check_sharing(config.share_prompts, directory, built)
    rotations.check_length("train.row_length", config.row_length, built, directory)
    attention.choose(config.model.attention, device, compute_dtype(config.precision, device))
    return Devices(device.type, 1 if device.type == "cpu" else torch.accelerator.device_count(), memory_of(device))
