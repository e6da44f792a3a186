"""Finds what constructing the trainer would refuse, without reading weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from areal_x.hf.image_format import takes_images
from areal_x.protocols.backends import Devices
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Loss, Policy, evaluate_loss
from areal_x_torch import attention, experts, loading, lora, rope, sequence_parallel
from areal_x_torch.device import compute_dtype, find_device, memory_of
from areal_x_torch.flat_rows import to_tensor
from areal_x_torch.images import check_sharing
from areal_x_torch.pipeline import check_adapters, names_of
from areal_x_torch.sharding import check_model, sizes_of
from areal_x_torch.tensor_split import styles_of


def check(config: TrainerConfig) -> Devices:
    """See `areal_x.protocols.backends.Backend`.

    Raises: UserError for a mesh that does not match the processes or does not divide the model, for
    unsupported attention, adapters or shared prompts, and for a model that this backend computes
    differently from transformers.
    """
    device, directory = find_device(), Path(str(config.model.path))
    if config.lora.rank:
        lora.check_targets(directory, config.lora)
    sizes_of(config.mesh)
    offload = config.offload and device.type != "cpu"
    # None: preflight checks memory elsewhere.
    check_model(directory, config.mesh, None, learns=not config.lora.rank, offload=offload)
    model = loading.build(directory, config.head)
    if config.mesh.tensor > 1:
        styles_of(model, config.mesh.tensor)
        sequence_parallel.check(config, model)
    if config.mesh.stage > 1:
        names_of(model, config.mesh.stage)
        check_adapters(model, config)
    experts.hook_routers(model, config, directory)
    built = model.config
    check_sharing(config.share_prompts, directory, built)
    rope.check_length("train.row_length", config.row_length, built, directory)
    attention.choose(config.model.attention, device, compute_dtype(config.precision, device))
    return Devices(
        device.type,
        1 if device.type == "cpu" else torch.accelerator.device_count(),
        memory_of(device),
        images=takes_images(built) or not hasattr(built, "vision_config"),
    )


def differentiate(loss: Loss, policy: Policy, batch: Batch) -> tuple[np.ndarray, Policy]:
    """See `areal_x.protocols.backends.Backend`."""
    device = torch.device("cpu")
    given = {
        f.name: to_tensor(x, device)
        for f in fields(Policy)
        if (x := getattr(policy, f.name)) is not None
    }
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    rows = batch.map(lambda x: to_tensor(x, device))
    terms, _ = evaluate_loss(loss, Policy(**leaves), rows)
    total = (rows.weights * terms).sum()
    if total.requires_grad:
        total.backward()
    gradients = {
        name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in leaves.items()
    }
    return terms.detach().numpy(), Policy(**gradients)
