"""The ways of weights to the servers (`vllm.transport`), and what each requires.

files     safetensors in a folder that trainer and servers see; generation pauses while they are read
nccl      experimental: a broadcast from GPU to GPU (areal_x.engines.vllm.broadcast)
hccl      experimental: the same from NPU to NPU, to vllm-ascend's servers
rdt       experimental: every worker pulls its slices from the processes that train, through Ray and
          NIXL (areal_x.engines.vllm.rdt_sender)
handles   experimental: a server on the trainer's own GPU opens its memory (areal_x.engines.vllm.gpu_transfer)
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from areal_x.engines.fleet.config import check_places
from areal_x.engines.fleet.server import VISIBLE
from areal_x.engines.vllm.dialects import check_started
from areal_x.engines.vllm.hccl_sender import accelerator
from areal_x.engines.vllm.hccl_sender import missing_packages as missing_for_npus
from areal_x.engines.vllm.installed import check_plugin, installed_dialect, is_cpu_build
from areal_x.engines.vllm.plugin import BACKEND, RDT
from areal_x.errors import ConfigError, one_of
from areal_x.protocols.backends import load_backend

if TYPE_CHECKING:
    from areal_x.engines.vllm.config import VLLMConfig

EXPERIMENTAL = (
    "vllm.transport = {transport!r} is experimental: it has not run on {devices} ({page} lists what was"
    " tested)"
)
# vLLM's weight-transfer backend for each vllm.transport
TRANSPORTS = {"files": BACKEND, "nccl": "nccl", "hccl": "hccl", "rdt": RDT, "handles": "ipc"}
GROUPS = ("nccl", "hccl")  # each device is in the group of trainer and servers once


def experimental(transport: str) -> str:
    """Returns the warning about a transport other than files."""
    where = ("NPUs", "docs/ascend.md") if transport == "hccl" else ("GPUs", "docs/torch.md")
    return EXPERIMENTAL.format(transport=transport, devices=where[0], page=where[1])


def check_settings(config: VLLMConfig) -> None:
    """Raises: ConfigError for settings that the transport cannot work with."""
    one_of("vllm.transport", config.transport, tuple(TRANSPORTS))
    if config.transport != "handles" and config.allow_unpickling:
        wanted = "False unless vllm.transport = 'handles', which alone needs it"
        raise ConfigError("vllm.allow_unpickling", True, wanted)
    if config.urls and config.transport in ("hccl", "handles"):
        raise ConfigError(
            "vllm.urls",
            config.urls,
            f"empty with vllm.transport = {config.transport!r}, which needs servers started by the run",
        )
    if config.transport != "handles":
        return
    if config.servers > 1:
        raise ConfigError(
            "vllm.servers",
            config.servers,
            "1 with vllm.transport = 'handles', on the trainer's own GPU",
        )
    for name in ("tensor", "pipeline", "data"):
        if getattr(config, name) > 1:
            wanted = "1 with vllm.transport = 'handles', whose server is on the trainer's own GPU"
            raise ConfigError(f"vllm.{name}", getattr(config, name), wanted)
    if not config.allow_unpickling:
        wanted = (
            "True with vllm.transport = 'handles', as handles are sent as pickles and a pickle can"
            " run any code"
        )
        raise ConfigError("vllm.allow_unpickling", False, wanted)


def check_run(config: VLLMConfig, backend: str, here: bool, lora_rank: int) -> None:
    """Raises: ConfigError for a trainer whose weights the transport cannot send, or servers that
    cannot be placed. here: the trainer is in this process, and the servers that the run starts are
    on this machine."""
    check_places(config, here)
    check_delta(config, lora_rank)
    if config.transport == "files":
        return
    if config.transport in GROUPS and here and not config.urls and not config.devices:
        wanted = (
            "each server's devices, none of them the trainer's, with vllm.transport ="
            f" {config.transport!r}"
        )
        raise ConfigError("vllm.devices", (), wanted)
    if config.transport == "hccl" and not here:
        wanted = (
            "'files' with train.cluster = 'ray', as its group meets on one machine, where no other can"
            " reach it"
        )
        raise ConfigError("vllm.transport", config.transport, wanted)
    if config.transport == "rdt" and here:
        wanted = "'files' or 'nccl' with train.cluster = 'here', as only processes on Ray send so"
        raise ConfigError("vllm.transport", config.transport, wanted)
    if config.transport == "handles" and not here:
        wanted = "'files' with train.cluster = 'ray', where trainer and server share no GPU"
        raise ConfigError("vllm.transport", config.transport, wanted)
    if config.transport not in load_backend(backend).TRANSPORTS:
        wanted = (
            f"'files' with train.backend = {backend!r}, which cannot send its tensors so (the torch"
            " backend can)"
        )
        raise ConfigError("vllm.transport", config.transport, wanted)
    if lora_rank:
        raise ConfigError(
            "vllm.transport",
            config.transport,
            "'files' with adapters, which are small and load without a pause",
        )


def check_delta(config: VLLMConfig, lora_rank: int) -> None:
    """Raises: ConfigError for deltas of adapters."""
    if config.delta and lora_rank:
        wanted = "0 with adapters, which are small and published whole"
        raise ConfigError("vllm.delta", config.delta, wanted)


def check_machine(config: VLLMConfig, here: bool = True) -> None:
    """Raises: ConfigError if this process cannot send weights from its GPU, or not to the servers'
    GPUs, or the vLLM that is installed is too old for what is set. here: the trainer is in this
    process; others check their own when they first send."""
    if not config.urls:
        check_started(config, installed_dialect())
        check_plugin()
    if config.transport == "rdt":
        check_packages(config)
    if config.transport == "files" or not here:
        return
    if find_spec("vllm") is None:
        wanted = (
            "'files' unless vLLM is installed beside the trainer (`pip install vllm`), as its own"
            " code sends"
        )
        raise ConfigError("vllm.transport", config.transport, wanted)
    import torch

    if config.transport == "hccl":
        check_npus(config)
    elif not torch.cuda.is_available():
        wanted = "'files' where torch finds no CUDA device"
        if accelerator() == "npu":
            wanted = "'files' or 'hccl' where torch finds NPUs"
        raise ConfigError("vllm.transport", config.transport, wanted)
    if config.urls:
        return
    if is_cpu_build():
        raise ConfigError(
            "vllm.transport",
            config.transport,
            "'files' with the CPU build of vLLM that is installed",
        )
    of_gpus, of_npus = VISIBLE
    visible = of_npus if config.transport == "hccl" else of_gpus
    own = trainer_device(torch.accelerator.current_device_index(), visible)
    if config.transport in GROUPS and any(own in device.split(",") for device in config.devices):
        raise ConfigError(
            "vllm.devices",
            config.devices,
            f"other devices than {own}, the trainer's, as {config.transport.upper()} allows one rank"
            " per device",
        )
    if config.transport == "handles" and config.devices not in ((), (own,)):
        raise ConfigError(
            "vllm.devices",
            config.devices,
            f"({own!r},), the trainer's own GPU, with vllm.transport = 'handles'",
        )


def check_packages(config: VLLMConfig) -> None:
    """Raises: ConfigError if this machine, whose environment all nodes share, lacks what "rdt"
    needs."""
    if missing := missing_packages():
        wanted = f"'files' unless all nodes have {missing} (`pip install {missing}`)"
        raise ConfigError("vllm.transport", config.transport, wanted)
    if not config.urls and is_cpu_build():
        wanted = "'files' with the CPU build of vLLM that is installed"
        raise ConfigError("vllm.transport", config.transport, wanted)


def check_npus(config: VLLMConfig) -> None:
    """Raises: ConfigError if this process has no NPU, or lacks what "hccl" needs."""
    if missing := missing_for_npus():
        wanted = f"'files' unless {missing} are installed beside the trainer (see docs/ascend.md)"
        raise ConfigError("vllm.transport", config.transport, wanted)
    if accelerator() != "npu":
        raise ConfigError("vllm.transport", config.transport, "'files' where torch finds no NPU")


def missing_packages() -> str:
    """Returns the packages that "rdt" needs and that are not installed here, in one line."""
    needed = {"ray": ("ray",), "nixl": ("nixl", "nixl_rocm"), "vllm": ("vllm",)}
    return " ".join(package for package, names in needed.items() if not any(map(find_spec, names)))


def trainer_device(index: int, variable: str) -> str:
    """Returns the name in an environment variable, which lists those that a process sees, of the
    device with torch's index `index`."""
    visible = os.environ.get(variable, "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index] else str(index)
