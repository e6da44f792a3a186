"""Experimental: `vllm.transport = 'hccl'` in the processes that train on Ascend NPUs
(areal_x.engines.vllm.group_sender): vllm-ascend's own code packs and broadcasts, as the code of the
same package receives in the servers.

vllm-ascend's workers meet in a store at an address and a port, whose contents they unpickle: it is
served on the loopback interface alone, on a port of the system's choice, until all have joined.
It has not run on NPUs: docs/ascend.md lists what the tests cover.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, ClassVar

from areal_x.engines.fleet.addresses import LOOPBACK
from areal_x.engines.vllm.group_sender import Declared, GroupSender, Weights
from areal_x.errors import UserError

# the module of each package that sends
PACKAGES = {"torch-npu": "torch_npu", "vllm": "vllm", "vllm-ascend": "vllm_ascend"}
SECONDS_TO_MEET = timedelta(minutes=5)  # vLLM's own default


@dataclass(frozen=True)
class HCCL:
    """See `areal_x.engines.vllm.group_sender.Library`."""

    name: ClassVar[str] = "hccl"

    def sender(self, trainer: Any, is_sender: bool) -> HCCLSender:
        check_device()
        return HCCLSender(AlignedWeights(trainer), is_sender)

    def invitation(self, sender: HCCLSender, size: int, here: bool) -> dict[str, Any]:
        from vllm_ascend.distributed.weight_transfer import hccl_engine

        if not here:
            raise UserError(
                "vllm.transport = 'hccl' needs all servers on the trainer's machine, as their"
                " workers unpickle what they find where the group meets: use 'files'"
            )
        sender.meeting_place = socket.create_server((LOOPBACK, 0))
        info = hccl_engine.HCCLWeightTransferInitInfo(
            master_address=LOOPBACK,
            master_port=sender.meeting_place.getsockname()[1],
            rank_offset=1,
            world_size=size,
        )
        return asdict(info)

    def join(self, sender: HCCLSender, invitation: dict[str, Any]) -> Group:
        import torch
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator

        assert sender.meeting_place is not None
        size = invitation["world_size"]
        store = torch.distributed.TCPStore(
            invitation["master_address"],
            invitation["master_port"],
            size,
            is_master=True,
            timeout=SECONDS_TO_MEET,
            wait_for_workers=False,  # HCCL itself waits for them, with a time limit of its own
            master_listen_fd=sender.meeting_place.detach(),
            use_libuv=False,
        )
        communicator = PyHcclCommunicator(
            StatelessProcessGroup(rank=0, world_size=size, store=store),
            device=torch.accelerator.current_device_index(),
        )
        if communicator.disabled:  # it would send nothing, without an error
            raise UserError(
                "vllm.transport = 'hccl' cannot load HCCL's library: source CANN's set_env.sh before"
                " python starts, or set HCCL_SO_PATH"
            )
        communicator.group = None  # closes the store
        return Group(communicator, torch.npu.Stream())

    def announcement(self, names: list[str], dtype_names: list[str], shapes: list[Any]) -> Any:
        from vllm_ascend.distributed.weight_transfer import hccl_engine

        # vllm-ascend cannot receive a tensor without dimensions; vLLM loads one number into it.
        return hccl_engine.HCCLWeightTransferUpdateInfo(
            names=names,
            dtype_names=dtype_names,
            shapes=[shape or [1] for shape in shapes],
            packed=True,
        )


SIDE = GroupSender(HCCL())


class AlignedWeights(Weights):
    """Yields the tensors of large numbers first: vllm-ascend views each one where it begins in a
    buffer of bytes, which has to be a multiple of the size of its numbers. It is one pass over the
    trainer's tensors for each size, of which a model has one if no tensor is of integers."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._metadata.sort(key=lambda x: -x.dtype.itemsize)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for size in dict.fromkeys(x.dtype.itemsize for x in self._metadata):
            for name, x in super().__iter__():
                if x.dtype.itemsize == size:
                    yield name, x


@dataclass
class Group:
    """The group to broadcast in. It waits for each broadcast, which vllm-ascend's producer does not:
    it reuses the memory of a buffer once that is packed anew. The stream is the group's own, so that
    a broadcast that waits for a lost server holds up nothing else on the NPU."""

    communicator: Any
    stream: Any
    _left: bool = False
    _broadcasts: bool = False

    def broadcast(self, tensor: Any, src: int) -> None:
        self._broadcasts = True  # before the look, as `leave` is called in another thread
        if self._left:
            raise RuntimeError("the group was left")
        self.communicator.broadcast(tensor, src=src, stream=self.stream)
        self.stream.synchronize()
        self._broadcasts = False

    def leave(self) -> None:
        """Frees the communicator, except in the middle of a broadcast: that ends by HCCL's own time
        limit (HCCL_EXEC_TIMEOUT)."""
        was_left, self._left = self._left, True
        if not was_left and not self._broadcasts:
            self.communicator.hccl.hcclCommDestroy(self.communicator.comm)


@dataclass
class HCCLSender:
    """Sends by vllm-ascend's producer. meeting_place: listens from the invitation on."""

    source: Weights
    is_sender: bool
    model_update_group: Group | None = None
    meeting_place: socket.socket | None = None

    def send_weights(self) -> None:
        import torch

        if not self.is_sender:
            for _ in self.source:  # joins in gathering
                pass
            torch.accelerator.synchronize()
            return
        from vllm_ascend.distributed.weight_transfer import hccl_engine

        how = hccl_engine.HCCLTrainerSendWeightsArgs(
            group=self.model_update_group,
            # a tensor without dimensions has no view as bytes
            post_iter_func=lambda item: item[1].reshape(-1),
            packed=True,
        )
        hccl_engine.HCCLWeightTransferEngine.trainer_send_weights(self._announced(), how)
        torch.accelerator.synchronize()

    def _announced(self) -> Iterator[tuple[str, Any]]:
        """Yields the tensors. The servers read what arrives by the announcement. Raises: ValueError
        for a tensor that was announced otherwise."""
        expected = iter(self.source.metadata())
        for name, x in self.source:
            found, wanted = Declared(name, x.dtype, tuple(x.shape)), next(expected, None)
            if found != wanted:
                raise ValueError(f"the trainer has {found} where {wanted} was announced")
            yield name, x
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"the trainer has no {missing}, which was announced")

    def shutdown(self) -> None:
        group, self.model_update_group = self.model_update_group, None
        if group is not None:
            group.leave()


def missing_packages() -> str:
    """Returns the packages that "hccl" needs and that are not installed here, in one line."""
    return " ".join(package for package, name in PACKAGES.items() if not find_spec(name))


def check_device() -> None:
    """Raises: UserError if this process has no NPU, or lacks a package."""
    if missing := missing_packages():
        raise UserError(
            f"vllm.transport = 'hccl' needs {missing} (docs/ascend.md: versions that belong"
            " together): use 'files'"
        )
    if (found := accelerator()) != "npu":
        raise UserError(
            "vllm.transport = 'hccl' needs an Ascend NPU in every process that trains, and torch"
            f" finds {found or 'no accelerator'}: use 'files'"
        )


def accelerator() -> str:
    """Returns the type of the accelerator that torch finds, "" if none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else str(found.type)
