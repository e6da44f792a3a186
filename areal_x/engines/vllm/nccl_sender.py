"""Experimental: `vllm.transport = 'nccl'` in the processes that train (areal_x.engines.vllm.group_sender):
vLLM's own sender packs and broadcasts.

NCCL's unique id reaches the servers behind their keys. (vLLM's alternative rendezvous is a store on
an open port whose contents every process unpickles.)
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from areal_x.engines.fleet.addresses import LOCAL_HOSTS, LOOPBACK
from areal_x.engines.vllm.group_sender import GroupSender, Weights
from areal_x.engines.vllm.server import LISTEN
from areal_x.errors import UserError


class EngineCalls:
    """Stands in for vLLM's client: the engine makes these calls itself."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass(frozen=True)
class NCCL:
    """See `areal_x.engines.vllm.group_sender.Library`."""

    name: ClassVar[str] = "nccl"

    def sender(self, trainer: Any, is_sender: bool) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        check_device(self.name)
        return NCCLTrainerWeightTransferEngine(
            client=EngineCalls(),
            source=weight_source(trainer),
            is_sender=is_sender,
            packed=True,
        )

    def invitation(self, sender: Any, size: int, here: bool) -> dict[str, Any]:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer import nccl_common
        from vllm.utils.nccl import unpinned_nccl_env

        if here and os.environ.get("MASTER_ADDR", LOOPBACK) in LOCAL_HOSTS:
            os.environ.setdefault(*LISTEN)
        with unpinned_nccl_env():
            unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        info = nccl_common.NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            rank_offset=1,
            world_size=size,
            packed=sender.packed,
            packed_buffer_size_bytes=sender.packed_buffer_size_bytes,
            packed_num_buffers=sender.packed_num_buffers,
        )
        return dict(nccl_common.worker_init_payload(info))

    def join(self, sender: Any, invitation: dict[str, Any]) -> Any:
        import torch
        from vllm.distributed.weight_transfer import nccl_common

        return nccl_common.uid_init_process_group(
            base64.b64decode(invitation["nccl_unique_id_b64"]),
            0,
            invitation["world_size"],
            torch.cuda.current_device(),
        )

    def announcement(self, names: list[str], dtype_names: list[str], shapes: list[Any]) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        return NCCLWeightTransferUpdateInfo(names=names, dtype_names=dtype_names, shapes=shapes)


SIDE = GroupSender(NCCL())


def check_device(transport: str) -> None:
    """Raises: UserError if this process has no CUDA device."""
    import torch

    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            f"vllm.transport = {transport!r} needs a CUDA device in every process that trains"
            f" ({error}): use 'files'"
        ) from error


def weight_source(trainer: Any) -> Any:
    """Returns vLLM's WeightSource of a trainer's tensors."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(Weights, WeightSource):  # type: ignore[misc]
        pass

    return Source(trainer, ParamMeta)
