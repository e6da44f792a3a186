"""Put first on PYTHONPATH, lets vLLM's sharded-RDT classes run in every process of a machine without GPUs.

What stands in: CUDA's streams and events by nothing, CUDA's handles of memory by files of shared memory, and, where the package
`nixl` is not installed, its agent by reads of the other process's memory. All else is vLLM's and Ray's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TRANSFER = "vllm.distributed.weight_transfer"
Replace = Callable[[Any, str, Any], None]


class View:
    """A module with other names beside its own."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Nothing:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...


CUDA = SimpleNamespace(
    Event=Nothing,
    Stream=Nothing,
    device=lambda device: nullcontext(),
    stream=lambda stream: nullcontext(),
    set_device=lambda device: None,
)


def shared(tensor: Any) -> tuple[None, tuple[int, ...]]:
    """Moves a tensor's memory into a file that other processes can open."""
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    return None, (os.getpid(), descriptor, size, 0, 0, 0, 0)


def opened(process: int, descriptor: int, size: int, *_: int) -> Any:
    import torch

    return torch.from_file(f"/proc/{process}/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def change_torch(torch: Any, replace: Replace = setattr) -> None:
    replace(torch.cuda, "current_device", lambda: 0)
    replace(torch.cuda, "synchronize", lambda: None)
    replace(torch.Tensor, "cuda", lambda tensor: tensor)


def change_sender(module: Any, replace: Replace = setattr) -> None:
    torch = module.torch
    view = View(
        torch,
        cuda=CUDA,
        accelerator=SimpleNamespace(current_device_index=lambda: 0),
        device=lambda *_: torch.device("cpu"),
        zeros=lambda *shape, device, **more: torch.zeros(*shape, **more),
    )
    replace(module, "torch", view)
    replace(module, "reduce_tensor", shared)
    replace(module, "rebuild_cuda_tensor", opened)


def change_receiver(module: Any, replace: Replace = setattr) -> None:
    replace(module, "torch", View(module.torch, cuda=CUDA))


CHANGES: dict[str, Callable[[Any], None]] = {
    "torch": change_torch,
    f"{TRANSFER}.sharded_rdt_trainer": change_sender,
    f"{TRANSFER}.sharded_rdt_engine": change_receiver,
}


class Changing:
    """Changes modules right after their import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGES or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        execute: Any = spec.loader.exec_module  # type: ignore[union-attr]

        def changed(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = changed  # type: ignore[union-attr, method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Changing())  # type: ignore[arg-type]
    sys.path.append(str(Path(__file__).parent / "fallback"))  # behind installed packages
