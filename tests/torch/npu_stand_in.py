"""A device kind "npu" that torch knows by name alone, as far as Python registers one: `python -m tests.torch.npu_stand_in`.

torch_npu renames torch's PrivateUse1 to "npu", registers a module for it and the backend "hccl" of torch.distributed. The
stand-in does the same without memory or operators; "hccl" is gloo underneath. Prints what the torch backend made of it, also
with a model on the host, as far as that goes without computing: what FSDP would put on the device is left where it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

# Before the stand-in is there, whose kernels transformers would import.
from areal_x.protocols.trainer_config import MeshConfig, OptimizerConfig
from areal_x_torch import attention, loading, optimizers, processes, sharding
from areal_x_torch.device import compute_dtype, find_device, make_deterministic, memory_of, peak_bytes
from tests.models import QWEN3, write_config

SEEDS: list[int] = []
GROUPS: list[str] = []


class Module(backend_registration._DummyBackendModule):
    def device_count(self) -> int:
        return 2

    def manual_seed_all(self, seed: int) -> None:
        SEEDS.append(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def hccl(options: Any, _: Any) -> Any:
    GROUPS.append("hccl")
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


def register() -> None:
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=Module())
    dist.Backend.register_backend("hccl", hccl, extended_api=True, devices=["npu"])
    sys.modules["torch_npu"] = SimpleNamespace(__spec__=1)  # type: ignore[assignment]


def empty(size: Any, *, dtype: Any = None, **how: Any) -> torch.Tensor:
    """A tensor of the device: a type and a shape, and no numbers."""
    made: torch.Tensor = torch._C._acc.create_empty_tensor(size, dtype or torch.float32)
    return made


def offloaded(device: torch.device, directory: Path) -> dict[str, Any]:
    """A model, its gradients and moments on the host: where each unit computes, and where everything is kept."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    pinned: list[int] = []
    asked: list[list[str]] = []
    materialize = sharding.materialize

    def on_host(module: Any, device: torch.device, parameters: torch.device) -> None:
        asked.append([str(device), str(parameters)])
        materialize(module, torch.device("cpu"), parameters)

    def pin(x: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(x.numel())
        return x

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    _fsdp_init._move_states_to_device = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin  # type: ignore[assignment, method-assign]
    sharding.materialize = on_host  # type: ignore[attr-defined, assignment]
    mesh = sharding.make_mesh(MeshConfig(), device, offload=True)
    assert mesh is not None
    model = loading.build(directory, "policy")
    whole = sharding.shard_model(model, mesh, torch.bfloat16, device, offload=True)
    loading.fill(model, directory)
    named = dict(model.named_parameters())
    optimizer = optimizers.Optimizer(named.items(), OptimizerConfig())
    before = {name: p.detach().to_local().clone() for name, p in named.items()}
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    units = [module._get_fsdp_state()._fsdp_param_group for module in whole.modules() if isinstance(module, FSDPModule)]
    return {
        "mesh": mesh.device_type,
        "asked": asked,
        "units": sorted({f"{unit.offload_policy} {unit.device}" for unit in units}),
        "count": len(units),
        "kept": sorted({str(p.to_local().device) for p in named.values()}),
        "moments": sorted({str(x.device) for state in optimizer.state.values() for x in state.values()}),
        "pinned": sum(pinned) == sum(p.numel() for p in named.values()),
        "moved": all(not torch.equal(p.to_local(), before[name]) for name, p in named.items()),
    }


def main() -> None:
    register()
    device = find_device()
    backends = processes.choose_device()
    processes.join_alone(device)
    summed = torch.ones(2)
    dist.all_reduce(summed)
    torch.manual_seed(7)
    make_deterministic(device)
    with torch.autocast(device.type, compute_dtype("auto", device)):
        autocast = str(torch.get_autocast_dtype(device.type))
    found = {
        "device": str(device),
        "precisions": [str(compute_dtype(precision, device)) for precision in ("auto", "fp32")],
        "memory": [memory_of(device), peak_bytes(device)],
        "attention": [attention.choose(how, device, torch.bfloat16).__name__ for how in ("auto", "npu", "sdpa")],
        "backends": backends,
        "config": dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD],
        "groups": GROUPS,
        "summed": summed.tolist(),
        "seeds": list(SEEDS),
        "autocast": autocast,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    with tempfile.TemporaryDirectory() as directory:
        found["offloaded"] = offloaded(device, write_config(QWEN3, Path(directory)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
