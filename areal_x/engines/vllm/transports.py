"""The ways of weights to the servers (`vllm.transport`), and what each requires.

files     safetensors in a folder that trainer and servers see; generation pauses while they are read
nccl      experimental: a broadcast from GPU to GPU (areal_x.engines.vllm.broadcast)
rdt       experimental: every worker pulls its slices from the processes that train, through Ray and
          NIXL (areal_x.engines.vllm.rdt_sender)
handles   experimental: a server on the trainer's own GPU opens its memory (areal_x.engines.vllm.gpu_transfer)
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from areal_x.engines.vllm.installed import is_cpu_build
from areal_x.engines.vllm.plugin import BACKEND, RDT
from areal_x.errors import ConfigError, one_of
from areal_x.protocols.backends import load_backend

if TYPE_CHECKING:
    from areal_x.engines.vllm.config import VLLMConfig

EXPERIMENTAL = (
    "vllm.transport = {transport!r} is experimental: it has not run on GPUs (docs/torch.md lists what"
    " was tested)"
)
# vLLM's weight-transfer backend for each vllm.transport
TRANSPORTS = {"files": BACKEND, "nccl": "nccl", "rdt": RDT, "handles": "ipc"}


def check_settings(config: VLLMConfig) -> None:
    """Raises: ConfigError for settings that the transport cannot work with."""
    one_of("vllm.transport", config.transport, tuple(TRANSPORTS))
    if config.transport != "handles":
        if config.allow_unpickling:
            wanted = "False unless vllm.transport = 'handles', which alone needs it"
            raise ConfigError("vllm.allow_unpickling", True, wanted)
        return
    if config.urls:
        raise ConfigError(
            "vllm.urls",
            config.urls,
            "empty with vllm.transport = 'handles', which needs a server started by the run",
        )
    if config.servers > 1:
        raise ConfigError(
            "vllm.servers",
            config.servers,
            "1 with vllm.transport = 'handles', on the trainer's own GPU",
        )
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
    if config.devices and not here:
        wanted = (
            "left out with train.cluster = 'ray', where Ray gives each server its accelerators"
            " (cluster.server_accelerators)"
        )
        raise ConfigError("vllm.devices", config.devices, wanted)
    if config.transport == "files":
        return
    if config.transport == "nccl" and here and not config.urls and not config.devices:
        wanted = "each server's GPUs, none of them the trainer's, with vllm.transport = 'nccl'"
        raise ConfigError("vllm.devices", (), wanted)
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


def check_places(config: VLLMConfig, here: bool) -> None:
    """Raises: ConfigError for servers that need the nodes of a cluster, or that do not divide among
    them."""
    if here and config.most:
        wanted = (
            "left out with train.cluster = 'here', where no machine joins: set vllm.servers, or"
            " train.cluster = 'ray'"
        )
        raise ConfigError("vllm.most", config.most, wanted)
    if here and config.hosts > 1:
        wanted = "1 with train.cluster = 'here', which is one machine; 'ray' has several"
        raise ConfigError("vllm.hosts", config.hosts, wanted)
    if config.hosts > 1:
        from areal_x.engines.vllm.placed import accelerators_of

        width = accelerators_of(config.arguments)
        if width % config.hosts:
            wanted = (
                f"a divisor of {width}, the product of the tensor, pipeline and data parallel sizes"
                " in vllm.arguments"
            )
            raise ConfigError("vllm.hosts", config.hosts, wanted)


def check_machine(config: VLLMConfig, here: bool = True) -> None:
    """Raises: ConfigError if this process cannot send weights from its GPU, or not to the servers'
    GPUs. here: the trainer is in this process; others check their own when they first send."""
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

    if not torch.cuda.is_available():
        raise ConfigError(
            "vllm.transport", config.transport, "'files' where torch finds no CUDA device"
        )
    if config.urls:
        return
    if is_cpu_build():
        raise ConfigError(
            "vllm.transport",
            config.transport,
            "'files' with the CPU build of vLLM that is installed",
        )
    own = trainer_gpu(torch.cuda.current_device())
    if config.transport == "nccl" and any(own in device.split(",") for device in config.devices):
        raise ConfigError(
            "vllm.devices",
            config.devices,
            f"other GPUs than {own}, the trainer's, as NCCL allows one rank per GPU",
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


def missing_packages() -> str:
    """Returns the packages that "rdt" needs and that are not installed here, in one line."""
    needed = {"ray": ("ray",), "nixl": ("nixl", "nixl_rocm"), "vllm": ("vllm",)}
    return " ".join(package for package, names in needed.items() if not any(map(find_spec, names)))


def trainer_gpu(index: int) -> str:
    """Returns the name in CUDA_VISIBLE_DEVICES of the GPU with torch's index `index`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index] else str(index)
