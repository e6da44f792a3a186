"""Experimental: the sending side of `vllm.transport = 'nccl'` and `'hccl'`, in the processes that
train: a broadcast by the first one, to all workers of all servers, of what all gather together.

    a library      areal_x.engines.vllm.nccl_sender, hccl_sender: how a group meets and what packs
    GroupSender    what is the same for both: who takes part, what is announced, when it is sent

The methods are called with each process's trainer and number, here or in the processes of a gang
(areal_x.protocols.trainer.InProcesses), and return what the first process returns. They have not
run on accelerators: docs/torch.md and docs/ascend.md list what the tests cover.

vLLM's own sender drives its servers too; here the engine does, which knows them, while the sender
broadcasts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

_senders: dict[str, Sender] = {}  # of this process, by library: one trainer is published


class Declared(NamedTuple):
    """What is announced of one tensor."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class Weights:
    """A trainer's tensors. It reads names and shapes in one pass over them, as only the trainer
    knows what it derives from a parameter; all later passes yield the same."""

    def __init__(self, trainer: Any, declared: Callable[..., Any] = Declared) -> None:
        self.trainer = trainer
        self._metadata = [
            declared(name, x.dtype, tuple(x.shape)) for name, x in trainer.device_weights()
        ]

    def metadata(self) -> list[Any]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.trainer.device_weights())


class Sender(Protocol):
    """What sends in one process. is_sender: True for the first one; the others only gather."""

    is_sender: bool
    model_update_group: Any

    @property
    def source(self) -> Any:
        """The `Weights`."""
        ...

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class Library(Protocol):
    """A library of collectives between accelerators."""

    @property
    def name(self) -> str: ...

    def sender(self, trainer: Any, is_sender: bool) -> Sender:
        """Raises: UserError without such an accelerator, or a package."""
        ...

    def invitation(self, sender: Any, size: int, here: bool) -> dict[str, Any]:
        """Returns what workers need to join a new group of `size` processes. here: all are on this
        machine."""
        ...

    def join(self, sender: Any, invitation: dict[str, Any]) -> Any:
        """Returns the group, once all others have joined it."""
        ...

    def announcement(self, names: list[str], dtype_names: list[str], shapes: list[Any]) -> Any:
        """Returns the receiving side's dataclass of an update."""
        ...


@dataclass(frozen=True)
class GroupSender:
    """The functions of the processes that train (areal_x.engines.vllm.broadcast.SendingSide)."""

    library: Library

    def invite(self, trainer: Any, rank: int, sizes: Sequence[int], here: bool) -> dict[str, Any]:
        """Returns what workers need to join a new group, of which the first process that trains is
        rank 0. sizes: the workers of each server. here: all are on this machine."""
        sender = self.sender_of(trainer, rank)
        return self.library.invitation(sender, 1 + sum(sizes), here) if sender.is_sender else {}

    def joining(self, invitation: dict[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Returns what each server is told to join. sizes: the workers of each."""
        offsets = itertools.accumulate(sizes[:-1], initial=1)
        return [{**invitation, "rank_offset": offset} for offset in offsets]

    def connect(self, trainer: Any, rank: int, invitation: dict[str, Any]) -> None:
        """Joins the group of an invitation, and leaves the one before. The first process waits here
        for all others."""
        sender = self.sender_of(trainer, rank)
        if sender.is_sender:
            sender.shutdown()
            sender.model_update_group = self.library.join(sender, invitation)

    def describe(self, trainer: Any, rank: int) -> dict[str, Any]:
        """Returns the names, types and shapes of what `send` broadcasts."""
        found = self.sender_of(trainer, rank).source.metadata()
        names = [x.name for x in found]
        dtype_names = [str(x.dtype).removeprefix("torch.") for x in found]
        return asdict(self.library.announcement(names, dtype_names, [list(x.shape) for x in found]))

    def send(self, trainer: Any, rank: int) -> None:
        """Broadcasts the weights, once all workers expect them."""
        import torch

        # Packing has streams of its own, which do not wait for the optimizer step on the trainer's.
        torch.accelerator.synchronize()
        self.sender_of(trainer, rank).send_weights()

    def leave(self, trainer: Any, rank: int) -> None:
        """Leaves the group. In another thread than `send` it ends a broadcast that waits forever,
        as far as the library can."""
        if (sender := _senders.get(self.library.name)) is not None:
            sender.shutdown()

    def sender_of(self, trainer: Any, rank: int) -> Sender:
        """Returns what sends in this process, which reads this trainer from now on. Raises:
        UserError if it cannot."""
        if (sender := _senders.get(self.library.name)) is None:
            sender = _senders[self.library.name] = self.library.sender(trainer, rank == 0)
        sender.source.trainer = trainer
        return sender
