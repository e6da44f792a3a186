"""Moves a trainer's state between its device and the host, bit for bit.

Modules, parameters and the optimizer's keys stay the same objects: the memory behind them moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")


def move(modules: Sequence[nn.Module], optimizer: Any, to: torch.device) -> None:
    """Moves parameters, buffers, gradients and the optimizer's states; returns once everything is
    there, and the memory that it leaves is free. optimizer: None for a frozen model."""
    for module in modules:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = moved(buffer, to)
        for x in module.parameters():  # each once: another module that has it sees its new memory
            x.data = moved(x.data, to)
            if x.grad is not None:
                x.grad.data = moved(x.grad.data, to)
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, x in state.items():
            state[name] = moved(x, to)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        if to.type == HOST.type:
            torch.accelerator.empty_cache()


def moved(x: Tensor, to: torch.device) -> Tensor:
    """Returns a tensor on a device, or itself if it is there. The copy of a GPU's is in pinned memory,
    which it leaves at the full rate of the bus."""
    if x.device.type == to.type:
        return x
    if to.type == HOST.type and x.device.type == "cuda":
        return torch.empty_like(x, device=to, pin_memory=True).copy_(x)
    return x.to(to)


def device_bytes(modules: Sequence[nn.Module], optimizer: Any) -> int:
    """Returns the bytes of the state that are not in the host's memory."""
    tensors = {id(x): x for x in state_of(modules, optimizer)}
    return sum(x.nbytes for x in tensors.values() if x.device.type != HOST.type)


def state_of(modules: Sequence[nn.Module], optimizer: Any) -> Iterator[Tensor]:
    """Yields the tensors that `move` moves, some more than once."""
    for module in modules:
        yield from module.buffers()
        for x in module.parameters():
            yield x
            if x.grad is not None:
                yield x.grad
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from state.values()
