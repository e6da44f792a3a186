"""Experimental: the sending side of `vllm.transport = 'nccl'`, in the processes that train: a
broadcast by the first one, to all workers of all servers, of what all gather together.

The functions are called with each process's trainer and number, here or in the processes of a gang
(areal_x.protocols.trainer.InProcesses), and return what the first process returns. They have not
run on GPUs or with a real server: docs/torch.md lists what the tests cover.

vLLM's own sender drives its servers too; here the engine does, which knows them, while the sender
broadcasts. NCCL's unique id reaches the servers behind their keys. (vLLM's alternative rendezvous
is a store on an open port whose contents every process unpickles.)
"""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from areal_x.engines.vllm.addresses import LOCAL_HOSTS, LOOPBACK
from areal_x.engines.vllm.server import LISTEN
from areal_x.errors import UserError

_sender: Any = None  # vLLM's, of this process: there is one trainer that is published


class EngineCalls:
    """Stands in for vLLM's client: the engine makes these calls itself."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def invite(trainer: Any, rank: int, sizes: Sequence[int], here: bool) -> dict[str, Any]:
    """Returns what workers need to join a new group, of which the first process that trains is rank
    0. sizes: the workers of each server. here: all are on this machine."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.utils.nccl import unpinned_nccl_env

    sender = sender_of(trainer, rank)
    if not sender.is_sender:
        return {}
    if here and os.environ.get("MASTER_ADDR", LOOPBACK) in LOCAL_HOSTS:
        os.environ.setdefault(*LISTEN)
    with unpinned_nccl_env():
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
    info = nccl_common.NCCLWeightTransferInitInfo(
        nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
        rank_offset=1,
        world_size=1 + sum(sizes),
        packed=sender.packed,
        packed_buffer_size_bytes=sender.packed_buffer_size_bytes,
        packed_num_buffers=sender.packed_num_buffers,
    )
    return dict(nccl_common.worker_init_payload(info))


def joining(invitation: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns what each server is told to join. sizes: the workers of each."""
    offsets = itertools.accumulate(sizes[:-1], initial=1)
    return [{**invitation, "rank_offset": offset} for offset in offsets]


def connect(trainer: Any, rank: int, invitation: dict[str, Any]) -> None:
    """Joins the group of an invitation, and leaves the one before. The first process waits here for
    all others."""
    import torch
    from vllm.distributed.weight_transfer import nccl_common

    sender = sender_of(trainer, rank)
    if sender.is_sender:
        sender.shutdown()
        sender.model_update_group = nccl_common.uid_init_process_group(
            base64.b64decode(invitation["nccl_unique_id_b64"]),
            0,
            invitation["world_size"],
            torch.cuda.current_device(),
        )


def describe(trainer: Any, rank: int) -> dict[str, Any]:
    """Returns the names, types and shapes of what `send` broadcasts."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    found = sender_of(trainer, rank).source.metadata()
    info = NCCLWeightTransferUpdateInfo(
        names=[x.name for x in found],
        dtype_names=[str(x.dtype).removeprefix("torch.") for x in found],
        shapes=[list(x.shape) for x in found],
    )
    return asdict(info)


def send(trainer: Any, rank: int) -> None:
    """Broadcasts the weights, once all workers expect them."""
    import torch

    # vLLM packs on its own CUDA streams, which do not wait for the optimizer step on the trainer's.
    torch.cuda.synchronize()
    sender_of(trainer, rank).send_weights()


def leave(trainer: Any, rank: int) -> None:
    """Leaves the group. In another thread than `send` it ends a broadcast that waits forever."""
    if _sender is not None:
        _sender.shutdown()


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


def sender_of(trainer: Any, rank: int) -> Any:
    """Returns vLLM's sender in this process, which reads this trainer from now on. Raises: UserError
    if there is no GPU."""
    global _sender
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    if _sender is None:
        check_device("nccl")
        _sender = NCCLTrainerWeightTransferEngine(
            client=EngineCalls(),
            source=weight_source(trainer),
            is_sender=rank == 0,
            packed=True,
        )
    _sender.source.trainer = trainer
    return _sender


def weight_source(trainer: Any) -> Any:
    """Returns vLLM's WeightSource of a trainer's tensors. It reads names and shapes in one pass
    over them, as only the trainer knows what it derives from a parameter; all later passes yield
    the same."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]
        def __init__(self) -> None:
            self.trainer = trainer
            self._metadata = [
                ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in trainer.device_weights()
            ]

        def metadata(self) -> list[Any]:
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return iter(self.trainer.device_weights())

    return Source()
