"""Stands in for CANN alone, so that vllm-ascend's own weight transfer runs on a CPU: the six functions of HCCL's library, as
broadcasts of torch.distributed over gloo, and streams that need not be waited for.

Everything above them is vllm-ascend's: the binding of the library, the communicator, the packing, the receiving engine.
`register` does this in vLLM's processes, as a plugin of vLLM (the entry point that `write_plugin` makes).
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAME = "hccl_on_cpu"  # of vLLM's plugin, and of the library
PLUGINS = f"areal_x,{NAME}"  # all that vLLM may load: vllm-ascend's own need an NPU
ITEM_BYTES = {0: 1, 2: 4, 3: 2, 4: 4, 5: 8, 7: 1, 10: 8, 11: 2}  # by vllm-ascend's numbers of types
SECONDS = timedelta(seconds=100)

_stores: dict[int, dist.TCPStore] = {}  # by port: served by the first process of a group
_groups: dict[int, Any] = {}  # by the library's handle
_handles = itertools.count(1)
_errors: list[str] = [""]


class Stream:
    npu_stream = 0

    def synchronize(self) -> None: ...


class Device(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, torch.device)


class OnCpu:
    """torch, where an NPU is the CPU."""

    class device(metaclass=Device):
        def __new__(cls, name: object) -> Any:
            return torch.device("cpu")

    class accelerator:
        @staticmethod
        def current_device_index() -> int:
            return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: str, **how: Any) -> torch.Tensor:
        assert device == "npu"
        return torch.empty(*size, **how)


def get_root_info(root_info: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SECONDS, wait_for_workers=False)
    _stores[store.port] = store
    place = f"{store.port}".encode()
    root_info._obj.internal[: len(place)] = place


def comm_init_root_info(size: int, root_info: Any, rank: int, comm: Any) -> None:
    port = int(bytes(root_info._obj.internal).rstrip(b"\0"))
    store = _stores.get(port) or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SECONDS)
    handle = next(_handles)
    _groups[handle] = dist.ProcessGroupGloo(store, rank, size, SECONDS)
    comm._obj.value = handle


def memory(pointer: Any, count: int, kind: int) -> torch.Tensor:
    """The bytes of a buffer, without a copy."""
    size = count * ITEM_BYTES[kind]
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer.value), dtype=torch.uint8)


def broadcast(buffer: Any, count: int, kind: int, root: int, comm: Any, stream: Any) -> None:
    if count:
        _groups[comm.value].broadcast(memory(buffer, count, kind), root).wait()


def all_reduce(sent: Any, received: Any, count: int, kind: int, op: int, comm: Any, stream: Any) -> None:
    assert (kind, op) == (4, 0), "float32, a sum: as the communicator warms up"
    total = memory(received, count, kind).copy_(memory(sent, count, kind))
    _groups[comm.value].allreduce(total.view(torch.float32)).wait()


def comm_destroy(comm: Any) -> None:
    del _groups[comm.value]


def checked(function: Callable[..., None]) -> Callable[..., int]:
    """A function of C: returns a number, not 0 after an error."""

    def call(*arguments: Any) -> int:
        try:
            function(*arguments)
        except RuntimeError as error:
            _errors[:] = [f"{error}"]
            return 1
        return 0

    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "HcclGetErrorString": lambda code: _errors[0].encode(),
    "HcclGetRootInfo": checked(get_root_info),
    "HcclCommInitRootInfo": checked(comm_init_root_info),
    "HcclBroadcast": checked(broadcast),
    "HcclAllReduce": checked(all_reduce),
    "HcclCommDestroy": checked(comm_destroy),
}


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Lets vllm-ascend's weight transfer run in this process."""
    npu = ModuleType("torch.npu")
    vars(npu).update(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda stream: nullcontext(),
        device=lambda index: nullcontext(),
        is_available=lambda: False,
    )
    torch_npu = ModuleType("torch_npu")
    torch_npu.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    sys.modules["torch_npu"] = torch_npu
    torch.npu = npu
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["HCCL_SO_PATH"] = NAME

    from vllm_ascend.distributed.device_communicators import pyhccl, pyhccl_wrapper
    from vllm_ascend.distributed.weight_transfer import hccl_engine, packed_tensor

    for module in (pyhccl, hccl_engine, packed_tensor):
        replace(module, "torch", OnCpu())
    assert {function.name for function in pyhccl_wrapper.HCCLLibrary.exported_functions} == FUNCTIONS.keys()
    pyhccl_wrapper.HCCLLibrary.path_to_library_cache[NAME] = object()
    pyhccl_wrapper.HCCLLibrary.path_to_dict_mapping[NAME] = FUNCTIONS


def register() -> None:
    """Lets workers of vLLM for CPU receive by vllm-ascend's engine."""
    install()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm_ascend.distributed.weight_transfer import register_engine

    if "hccl" not in WeightTransferEngineFactory._registry:
        register_engine()


def write_plugin(folder: Path) -> Path:
    """Writes what makes vLLM call `register` where this folder is on Python's path."""
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n")
    return folder
