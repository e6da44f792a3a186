"""The order in which a pipeline's processes compute chunks of layers for micro-batches, and its
execution.

    process 0    F0 F1          B0    F2 B1       F3 B2  …      two processes, one chunk each:
    process 1       F0 B0    F1 B1       F2 B2           …      one forward, one backward (1F1B)

Orders, and where in them states are sent and received so that no two processes wait for each other,
are those of torch.distributed.pipelining. Its runtime is not used: it receives into buffers of one
shape, all of which exist at once, while the micro-batches of packed rows have any number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor
from torch.distributed import ProcessGroup

States: TypeAlias = Float32[Tensor, "tokens features"]
"""Of a micro-batch's tokens, between two layers."""


class Action(NamedTuple):
    """What a process does next. kind: "F" computes a chunk, "B" its gradient; "SEND_F", "RECV_F",
    "SEND_B" and "RECV_B" move what one chunk gives to the next, or its gradient back. chunk: of all,
    in the order of layers; for a transfer the chunk of the process that makes it."""

    kind: str
    chunk: int
    micro_batch: int


@cache
def order(
    processes: int, chunks_each: int, count: int, learns: bool = True
) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each process for so many micro-batches: 1F1B (arXiv 2104.04473, figure
    4), interleaved if a process has several chunks; without backward passes unless it learns.

    Process i has the chunks i, i + processes, …
    """
    from torch.distributed.pipelining import schedules

    kinds = ("F", "B") if learns else ("F",)
    with_transfers = schedules._add_send_recv(
        {
            process: [a for a in actions if a.computation_type.value in kinds]
            for process, actions in enumerate(_computed(processes, chunks_each, count))
        },
        lambda chunk: chunk % processes,
        processes * chunks_each,
    )
    return tuple(
        tuple(
            Action(a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in with_transfers[process]
            if a.microbatch_index is not None and a.microbatch_index < count
        )
        for process in range(processes)
    )


def _computed(processes: int, chunks_each: int, count: int) -> list[list[Any]]:
    """Returns what each process computes, as torch's actions. Those of micro-batches from `count` on
    are there because an order may need more of them; nothing has to be done for them."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD, _Action

    if chunks_each == 1:  # torch's interleaved order would keep almost twice as many in flight
        found = []
        for process in range(processes):
            forward = [_Action(process, FORWARD, number) for number in range(count)]
            backward = [_Action(process, FULL_BACKWARD, number) for number in range(count)]
            ahead = min(processes - 1 - process, count)
            pairs = zip(forward[ahead:], backward[: count - ahead], strict=True)
            between = [action for pair in pairs for action in pair]
            found.append([*forward[:ahead], *between, *backward[count - ahead :]])
        return found
    # torch's micro-batches are computed in equal rounds of at least as many as there are processes.
    while count % max(1, count // processes):
        count += 1
    chunks: Any = [
        SimpleNamespace(
            num_stages=processes * chunks_each,
            group_size=processes,
            group_rank=0,
            stage_index=number * processes,
        )
        for number in range(chunks_each)
    ]
    schedule = ScheduleInterleaved1F1B(chunks, count, lambda *_: torch.zeros(()))
    return [[a for a in schedule.pipeline_order[i] if a is not None] for i in range(processes)]


def in_flight(processes: int, chunks_each: int) -> float:
    """Returns for how many micro-batches at most the first process, which has most, keeps what the
    backward pass through all of its chunks needs."""
    most = kept = 0
    for action in order(processes, chunks_each, 4 * processes)[0]:
        kept += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, kept)
    return most / chunks_each


@dataclass(frozen=True)
class Run:
    """One pass of micro-batches through the chunks of a process.

    compute: the last chunk gives what is differentiated, a number, or nothing; others give states.
    It has the micro-batch's number, the chunk, and the states that the chunk before gave (None for
    the first).
    """

    group: ProcessGroup
    chunks_each: int
    tokens: Sequence[int]
    """Of this process's part of each micro-batch."""

    features: int
    device: torch.device
    compute: Callable[[int, int, States | None], Tensor | None]
    learns: bool = True

    def __call__(self) -> None:
        """Executes this process's actions. All processes of the group do so together."""
        size, rank = self.group.size(), self.group.rank()
        kept: dict[tuple[int, int], tuple[States | None, Tensor | None]] = {}
        arriving: dict[tuple[str, int, int], tuple[States, dist.Work]] = {}
        leaving: dict[tuple[str, int, int], States] = {}
        sent: deque[tuple[dist.Work, States]] = deque()

        def arrived(*key: Any) -> States:
            states, work = arriving.pop(key)
            work.wait()
            return states

        for action in order(size, self.chunks_each, len(self.tokens), self.learns)[rank]:
            kind, chunk, number = action
            key = kind[-1], chunk, number
            if kind.startswith("RECV"):
                shape = self.tokens[number], self.features
                states = torch.empty(shape, dtype=torch.float32, device=self.device)
                source = (chunk + (1 if kind == "RECV_B" else -1)) % size
                work = dist.irecv(states, group=self.group, group_src=source)
                assert work is not None
                arriving[key] = states, work
            elif kind.startswith("SEND"):
                states = leaving.pop(key)
                target = (chunk + (1 if kind == "SEND_F" else -1)) % size
                work = dist.isend(states, group=self.group, group_dst=target)
                assert work is not None
                sent.append((work, states))
                while sent and (sent[0][0].is_completed() or len(sent) > 2 * self.chunks_each):
                    sent.popleft()[0].wait()
            elif kind == "F":
                received = arrived(*key) if chunk else None
                if received is not None and self.learns:
                    received.requires_grad_()
                found = self.compute(number, chunk, received)
                if chunk + 1 < size * self.chunks_each:
                    assert found is not None
                    leaving[key] = found.detach().contiguous()
                if self.learns:
                    kept[key[1:]] = received, found
            else:
                received, found = kept.pop(key[1:])
                is_last = chunk + 1 == size * self.chunks_each
                gradient = None if is_last else arrived(*key)
                # Nothing below the first chunk of a model with adapters is trained, perhaps.
                if found is not None and found.requires_grad:
                    torch.autograd.backward(found, gradient)
                if received is not None:
                    gradient = received.grad
                    leaving[key] = torch.zeros_like(received) if gradient is None else gradient
        for work, _ in sent:
            work.wait()
